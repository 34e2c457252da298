"""Any process: module names of 0.1 and 0.2."""
