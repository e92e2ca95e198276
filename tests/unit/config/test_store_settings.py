"""Where copies of the state may go, and what is refused before anything is started."""

from __future__ import annotations

import pytest

from tests.support.syncer import tiny_config
from wan_diloco.config.relations import ignored_settings
from wan_diloco.errors import ConfigError


@pytest.mark.parametrize("store", ["s3://bucket/prefix", "s3a://bucket", "file:///mnt/runs/one", ""])
def test_a_store_that_can_be_locked_needs_nothing_else(store):
    config = tiny_config(syncer={"store": store})
    assert config.syncer.store == store
    assert not any("store" in warning for warning in ignored_settings(config))


@pytest.mark.parametrize("store", ["memory://runs", "gs://bucket/prefix", "ftp://host/folder"])
def test_a_store_without_conditions_is_refused_unless_the_operator_says_so(store):
    with pytest.raises(ConfigError, match=r"syncer\.store: .*nothing would keep a second syncer.*store_unlocked"):
        tiny_config(syncer={"store": store})
    assert tiny_config(syncer={"store": store, "store_unlocked": True}).syncer.store == store


@pytest.mark.parametrize("store", ["bucket/prefix", "s3:", "s3://", "s3:///", "://bucket", "s3://bucket/\nprefix"])
def test_what_is_no_address_is_refused(store):
    with pytest.raises(ConfigError, match=r"syncer\.store: .*isn't an address.*s3://bucket/prefix"):
        tiny_config(syncer={"store": store})


@pytest.mark.parametrize("endpoint", ["minio:9000", "s3://bucket", "https://", "http:host"])
def test_what_is_no_endpoint_is_refused_by_the_way_that_endpoints_are_written(endpoint):
    with pytest.raises(ConfigError, match=r"syncer\.store_endpoint: .*isn't an address.*https://host:port"):
        tiny_config(syncer={"store": "s3://bucket/x", "store_endpoint": endpoint})


@pytest.mark.parametrize("key", ["store", "store_endpoint"])
def test_secrets_in_an_address_are_refused_and_not_repeated(key):
    with pytest.raises(ConfigError) as caught:
        tiny_config(syncer={key: "https://somebody:hunter2@example.org/x"})
    assert "credentials belong in the environment" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_settings_of_a_store_without_a_store_are_said_to_do_nothing():
    config = tiny_config(syncer={"store_endpoint": "http://127.0.0.1:9000", "store_unlocked": True})
    warnings = ignored_settings(config)
    assert any(warning.startswith("syncer.store_endpoint has no effect") for warning in warnings)
    assert any(warning.startswith("syncer.store_unlocked has no effect") for warning in warnings)
