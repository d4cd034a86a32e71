"""Time sparse kernels, keep the tables, print what pays: measuring, tables and the command line."""
