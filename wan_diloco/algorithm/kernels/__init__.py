"""Machine code for the codecs and the merge, by numba: loops over blocks, and nothing that a caller should decide."""
