"""Functions with a Gaussian-process prior, given values or Gaussians for their inducing variables.

Read in this order:

- ``projection``: the orthogonal decomposition along sets of inducing variables, on which everything else rests, and each set's
  contribution to mean and variance under q.
- ``prior``: checks and decomposes kernels, features and inputs (``values_of_users``: those of users).
- ``marginals``: the moments of outputs at inputs, and their arithmetic.
- ``function``: :class:`GPFunction`, which a model calls at inputs, or at linear functionals of it.

Further modules: ``mean_only`` (points that move only the mean), ``stacking`` (functions side by side), ``terms`` (summands of a
kernel), ``latent_inputs`` and ``expected`` (Gaussian inputs), ``rounding`` (digits of variances), ``groups`` (the residual in
groups of rows), ``neighbors`` (predictions with the data near an input), ``paths`` (draws of whole functions), ``draws`` and
``runs`` (a run of a model sees one function), ``frozen`` (runs in which draws are constants, for ``check``), ``shared_draws``,
``deep`` and ``images`` (functions of functions), ``sites`` (names and plates of the model), ``keys`` (its random keys),
``callers`` (who is calling), ``no_array`` (what f(X) says where it is taken for an array).
"""
