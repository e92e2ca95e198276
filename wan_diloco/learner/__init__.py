"""The training job of one region, and the uplink process that speaks for it: the only home of torch.distributed.

The training process never waits for the uplink, and the uplink's death doesn't touch it. What they share is
memory that has no name (`slots`) and a socket pair with one line of JSON a message (`ipc`, `channel`).
"""
