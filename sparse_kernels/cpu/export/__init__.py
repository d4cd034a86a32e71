"""Plans that leave Python: machine code, packed weights, and a library in C that runs them."""
