"""The jobs behind `latbench search`, `latbench verify` and `latbench layers`."""
