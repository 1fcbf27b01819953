"""Residual networks for image classification: training, validation and what surrounds them."""
