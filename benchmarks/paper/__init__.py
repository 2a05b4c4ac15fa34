"""Tables of three papers, run again: what ``benchmarks/tables.py`` is made of.

``values`` has the papers' numbers, ``settings`` their experiments, ``runs`` one fit, ``collapsed`` the table that another
script runs, ``store`` the file of rows that are done.
"""
