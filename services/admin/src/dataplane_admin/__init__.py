"""The admin service of a data plane."""
