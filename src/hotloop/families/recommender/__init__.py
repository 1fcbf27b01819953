"""A deep autoencoder that predicts ratings (Kuchaiev and Ginsburg, 2017), and the conversion of rating data."""
