"""Times of this library beside GPflow, GPyTorch and GPJax, and beside the arithmetic floor: ``python -m benchmarks.peers``."""
