"""What q is: the families of Gaussians over whitened inducing variables, as mathematics, as distributions, as parameters.

- ``family``: what the package asks of a family.
- ``distributions``: q and the prior as NumPyro distributions, and the divergence between them.
- ``constraints``: how the parameters of q are stored while they are optimized.
- ``natural_step``, ``natural_gradient``: steps along the natural gradient, and the optimizer that takes them.
"""
