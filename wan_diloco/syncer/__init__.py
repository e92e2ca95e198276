"""The asyncio service that merges: it drives the syncer's machine, does its maths in threads, and owns the journal."""
