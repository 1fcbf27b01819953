"""CIFAR-10 to 94 % in about a second: whitening, every update and the test in one compiled call."""
