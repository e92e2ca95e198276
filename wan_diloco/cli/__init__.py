"""The command line: one module a command, each with a `register(app)`.

Importing a command imports nothing heavy; torch, grpc, pydantic and the packages that use them are
imported inside the bodies, so that `--help` answers at once. Results go to stdout, talk to stderr.
"""
