"""Gaussian-process regression with the inducing variables integrated out."""

from numpyro_orthgp.collapsed.distribution import CollapsedGP

__all__ = ["CollapsedGP"]
