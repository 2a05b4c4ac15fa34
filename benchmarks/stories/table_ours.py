import numpy as np

import numpyro_orthgp as ogp
from benchmarks.stories.data import table

X, y, X_test, y_test = table()
predicted = ogp.regression(X, y, M=60).predict(X_test)
lower, upper = predicted.interval(0.95)
rmse = np.sqrt(np.mean((predicted.mean - y_test) ** 2))
print(f"rmse {rmse:.3f}, inside {np.mean((lower < y_test) & (y_test < upper)):.2f}")
