"""Single layers and HMC, timed in training and inference."""
