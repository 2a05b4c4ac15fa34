import gpflow
import numpy as np

from benchmarks.stories.data import table

X, y, X_test, y_test = table()
loc, scale, y_loc, y_scale = X.mean(0), X.std(0), y.mean(), y.std()
X, X_test = (X - loc) / scale, (X_test - loc) / scale
data = X, ((y - y_loc) / y_scale)[:, None]
kernel = gpflow.kernels.Matern52(lengthscales=np.ones(3))
model = gpflow.models.SGPR(data, kernel, X[::10].copy(), noise_variance=0.1)
gpflow.optimizers.Scipy().minimize(model.training_loss, model.trainable_variables)
mean, variance = (moment.numpy()[:, 0] for moment in model.predict_y(X_test))
mean, sd = mean * y_scale + y_loc, np.sqrt(variance) * y_scale
lower, upper = mean - 1.96 * sd, mean + 1.96 * sd
rmse = np.sqrt(np.mean((mean - y_test) ** 2))
print(f"rmse {rmse:.3f}, inside {np.mean((lower < y_test) & (y_test < upper)):.2f}")
