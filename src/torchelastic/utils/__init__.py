"""A name of 0.1's: `torchelastic.utils.data`."""
