"""Three users' stories, each written with this package, GPflow and GPyTorch: a table, a hierarchical model of counts, a classifier.

The data are in ``data.py``. ``python -m benchmarks.stories`` counts lines; a script runs in an environment that has its library, as
``python -m benchmarks.stories.table_gpflow``.
"""
