"""Which kernel runs a layer: linear layers, convolutions, and the search for the fastest."""
