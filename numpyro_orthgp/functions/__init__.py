"""What a function with a Gaussian-process prior is, once its inducing variables are known or believed to be Gaussian.

Read in this order:

- ``projection``: the orthogonal decomposition along sets of inducing variables, the idea on which the rest stands, and what each
  set adds to mean and variance under q.
- ``prior``: kernels, features and inputs checked, and decomposed.
- ``marginals``: the moments of outputs at inputs, and their arithmetic.
- ``function``: :class:`GPFunction`, which a model calls at inputs, or at linear functionals of it.

Beside these: ``mean_only`` (points that move the mean alone), ``stacking`` (functions side by side), ``terms`` (the summands of a
sum), ``latent_inputs`` and ``expected`` (inputs that are Gaussian themselves), ``groups`` (the residual in groups of rows),
``neighbors`` (predictions with the data near an input), ``paths`` (whole functions drawn), ``draws`` and ``runs`` (a run of a
model sees one function), ``frozen`` (runs in which draws are constants, for ``check``), ``shared_draws``, ``deep`` and ``images``
(functions of functions), ``sites`` (what a function needs of its model).
"""
