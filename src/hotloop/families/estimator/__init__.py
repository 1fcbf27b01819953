"""The estimator family: train, evaluate and predict with a run config, for any model. `hotloop` offers its names."""
