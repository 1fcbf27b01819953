"""The families of models: the science. They know no command line."""
