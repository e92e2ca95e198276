"""Moving bytes between learners and a syncer: gRPC, and the same in process.

The only home of grpc; its status codes don't leave this package. Nothing is decided here: what was said
goes up to a handler, what is to be said comes down. Import the module that you need: `interface` costs
nothing, `grpc_server` and `grpc_client` load gRPC.
"""
