"""A real S3 server in this process, on loopback, and what tests do to the objects in it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from wan_diloco.storage import Manifest, ObjectStore, manifest_names, object_lock
from wan_diloco.syncer import shipping, store_link

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3Server:
    """moto's server; what is in it survives `stop` and `start`."""

    def __init__(self) -> None:
        self._port = 0
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        # A line a request, otherwise.
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()

    def stop(self) -> None:
        self._server.stop()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def new_place(self) -> str:
        """A prefix in a bucket that nobody has used before."""
        import s3fs

        bucket = f"bucket-{uuid.uuid4().hex[:12]}"
        s3fs.S3FileSystem(client_kwargs={"endpoint_url": self.endpoint}, skip_instance_cache=True).mkdir(bucket)
        return f"s3://{bucket}/runs/tiny"


@contextmanager
def s3_environment() -> Iterator[None]:
    """Credentials that no real server takes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server, and the credentials for it."""
    with s3_environment():
        server = S3Server()
        try:
            yield server
        finally:
            server.stop()


def hurry(patch: pytest.MonkeyPatch) -> None:
    """A store is looked at, and asked again, without the patience that a real one needs."""
    patch.setattr(store_link, "RENEW_S", 0.05)
    patch.setattr(object_lock, "_LOOK_S", 0.05)
    patch.setattr(shipping, "_RETRY_FIRST_S", 0.05)
    patch.setattr(shipping, "_RETRY_MAX_S", 0.2)


def manifests(store: ObjectStore) -> list[Manifest]:
    """Those in a store, newest first."""
    # One that is removed between the list and the look isn't among them.
    found = [(name, store.get_bytes(name)) for name in manifest_names(store.names())]
    return [Manifest.decode(data, name) for name, data in found if data is not None]


def damage(store: ObjectStore, name: str) -> None:
    """Turn a bit of an object."""
    data = bytearray(store.get_bytes(name) or b"")
    data[len(data) // 2] ^= 1
    store.put_bytes(bytes(data), name)


async def until_there(condition: Callable[[], bool], wait_s: float) -> None:
    """Until something is so in the store, which is asked from another thread: the syncer's loop goes on meanwhile."""
    async with asyncio.timeout(wait_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 -- nobody says so
            await asyncio.sleep(0.05)
