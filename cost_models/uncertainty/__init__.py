"""How wrong a time may be: conformal quantiles, measurement noise and errors beyond the measured range."""
