"""Markov chain Monte Carlo that any family can use."""
