"""The real machines, drivers and storage, run in virtual time: hours in seconds, the same at each run."""
