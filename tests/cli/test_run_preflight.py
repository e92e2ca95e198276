"""What is refused before anything is created, and that nothing is created then."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from wan_diloco.cli.launch import child_environment, process_specs
from wan_diloco.cli.preflight import check_data, check_memory, check_port, check_regions, check_source
from wan_diloco.cli.supervise import Patience
from wan_diloco.config import RunConfig, parse_config
from wan_diloco.errors import ConfigError, DataError

TEXT = "".join(f"This is paragraph {index} of a text that says little.\n\n" for index in range(2000))


def config_of(source: str = "sotu", **changes: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"name": "tiny", "tokens": "100k"},
        "model": {"dim": 16, "layers": 1, "heads": 2, "sequence_length": 16},
        "data": {"source": source},
        "inner": {"batch_tokens": 64},
        "sync": {"fragments": 3, "period_steps": 4},
        "regions": [{"name": "a"}, {"name": "b"}],
    }
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    return parse_config(tree)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_in_use_is_refused_and_a_free_one_is_not(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another port") as caught:
            check_port(config_of(syncer={"listen": f"{host}:{port}"}))
        assert caught.value.where == "syncer.listen"
    check_port(config_of(syncer={"listen": f"{host}:{port}"}))
    check_port(config_of(syncer={"listen": f"{host}:0"}))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="can't listen"):
        check_port(config_of(syncer={"listen": "192.0.2.1:0", "insecure": True}))


def test_a_missing_corpus_and_a_small_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        check_data(config_of(f"text:{tmp_path / 'nothing'}"))
    (tmp_path / "small.txt").write_text(TEXT[:4_000])
    with pytest.raises(DataError, match="is too small"):
        check_data(config_of(f"text:{tmp_path / 'small.txt'}"))


def test_a_corpus_that_suffices_for_every_region_is_fine(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    check_data(config_of(f"text:{tmp_path / 'text.txt'}"))


def test_a_vocabulary_without_all_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="256 or more"):
        check_data(config_of(model={"vocab": 255}))


@pytest.mark.parametrize("name", ["syncer", "evaluator"])
def test_a_region_cant_take_another_processs_name(name: str) -> None:
    config = parse_config({"run": {"tokens": "1M"}, "regions": [{"name": name}]})
    with pytest.raises(ConfigError, match="rename it"):
        check_regions(config)


def test_a_region_of_several_ranks_is_refused() -> None:
    config = parse_config({"run": {"tokens": "1M"}, "regions": [{"name": "a", "ranks": 2}]})
    with pytest.raises(ConfigError, match="one rank"):
        check_regions(config)


def test_a_model_that_cant_fit_is_refused_by_its_size() -> None:
    config = config_of(model={"dim": 65_536, "heads": 512, "layers": 1024})
    with pytest.raises(ConfigError, match=r"model: [0-9.]+T parameters need at least .*TiB of memory here") as caught:
        check_memory(config, learners=2, syncers=1)
    assert "model.layers" in caught.value.hint
    check_memory(config_of(), learners=2, syncers=1, replicas=2)


def test_a_batch_that_cant_fit_is_refused_by_its_size() -> None:
    batch = {"run": {"tokens": 10**13}, "inner": {"batch_tokens": 16 * 10**9}}
    with pytest.raises(ConfigError, match=r"batch_tokens: passes of 16B tokens need at least .*TiB") as caught:
        check_memory(config_of(**batch), learners=2)
    assert "inner.accumulation" in caught.value.hint
    check_memory(config_of(**{**batch, "inner": {"batch_tokens": 16 * 10**9, "accumulation": 10**6}}), learners=2)


def test_a_missing_text_is_noticed_without_reading_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder"):
        check_source(config_of(f"text:{tmp_path / 'nothing'}"))
    check_source(config_of(f"text:{tmp_path}"))
    check_source(config_of("sotu"))


def test_processes_get_the_resolved_configuration_and_no_settings_from_the_environment(tmp_path: Path) -> None:
    env = {"WAN_DILOCO_RUN__SEED": "2", "WAN_DILOCO_DEBUG": "1", "PATH": "/bin"}
    assert child_environment(env) == {"WAN_DILOCO_DEBUG": "1", "PATH": "/bin"}
    syncer, learners = process_specs(config_of(), tmp_path, Patience(), resume=False)
    assert str(tmp_path / "config.next.json") in syncer.first
    assert "--resume" not in syncer.first
    assert syncer.first[syncer.first.index("--end-within") + 1] == "17s"
    assert [spec.name for spec in learners] == ["a", "b"]
    assert all(spec.again == (*spec.first, "--resume") for spec in (syncer, *learners))
    assert {spec.log_path for spec in learners} == {tmp_path / "logs" / "a.log", tmp_path / "logs" / "b.log"}


def test_a_run_that_goes_on_resumes_from_its_first_process_on(tmp_path: Path) -> None:
    syncer, learners = process_specs(config_of(), tmp_path, Patience(), resume=True)
    assert all(spec.first[-1] == "--resume" and spec.first == spec.again for spec in (syncer, *learners))
