"""A variational autoencoder trained with the Variational Contrastive Divergence (Ruiz and Titsias, 2019)."""
