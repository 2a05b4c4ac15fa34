"""Linear algebra and quadrature: arrays in, arrays out. Nothing here depends on Gaussian processes or on NumPyro.

All tuning to XLA and LAPACK is here and only here. The rooms below write mathematics.

- ``products``: products of matrices, forward and backward; ``triangular``: solves and inverses by products; ``cholesky``: factors
  and their inverses; ``whitened``: products with these inverses whose derivatives take few others.
- ``linalg``: the jitter policy, joined arrays, functions whose derivatives need care.
- ``distances``, ``expansion``: squared distances, and weighted sums of functions of them.
- ``grouped``: matrices within groups of rows.
- ``blocks``, ``compiled``: many rows, some at a time; one program outside of ``jit``.
- ``kept``, ``program``, ``digest``: programs that are found again by what they compute, whichever function they came from.
- ``turns``: what other threads wait for.
- ``dependence``, ``interactions``: on which arguments results depend, and whether as a sum.
- ``resolution``: whether a dtype resolves the differences between numbers.
- ``quadrature``, ``peaks``, ``harmonics``: nodes and weights; densities about their peaks; polynomials on a sphere.
"""
