"""What is refused: always with the key, what is wrong, and what would be right; always exit code 78."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wan_diloco.config import load_config, parse_config
from wan_diloco.config.addresses import why_no_address
from wan_diloco.errors import EXIT_CONFIG, ConfigError

RUN = '[run]\ntokens = "1M"\n'
REGIONS = '[[regions]]\nname = "us-east"\n[[regions]]\nname = "eu-west"\n'


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    """The sentence with which this configuration is refused."""
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config([file], env={}, overrides=overrides)
    assert caught.value.exit_code == EXIT_CONFIG
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"{RUN}[outer]\nlr = 7e-1\n[inner]\nlr = 1e-4\neps = 1e-8\n{REGIONS}")
    config = load_config([file], env={}).config
    assert (config.outer.lr, config.inner.lr, config.inner.eps) == (0.7, 1e-4, 1e-8)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        # a number as text
        ('[inner]\nlr = "1e-4"', "inner.lr: must be a number, not the text '1e-4' (write it without quotes"),
        ('[sync]\nquorum = "1"', "sync.quorum: must be a whole number, not the text '1' (write it without quotes"),
        ('[model]\ntied = "true"', "model.tied: must be true or false, not the text 'true' (write it without quotes"),
        ("[inner]\nlr = nan", "inner.lr: must be finite, not nan"),
        ("[inner]\nlr = true", "inner.lr: must be a number, not True"),
        ("[sync]\nfragments = 2.5", "sync.fragments: must be a whole number, not 2.5"),
        ("[data]\nsource = 5", "data.source: must be text, not 5"),
        ('[outer]\nmean_patterns = "embed"', "outer.mean_patterns: must be a list, not the text 'embed'"),
        # a key that isn't there
        ("[sync]\nquorom = 1", "sync.quorom: is unknown (did you mean sync.quorum; set by file"),
        ("[sync]\nsync_evry = 100", "sync.sync_evry: is unknown (did you mean "),
        ("[sync]\nwhatever = 1", "sync.whatever: is unknown ([sync] knows topology, fragments, period_steps"),
        ("[outer]\nquorum = 2", "outer.quorum: is unknown (did you mean sync.quorum"),
        ("[wire]\nlr = 1.0", "wire.lr: is unknown (did you mean inner.lr or outer.lr"),
        ("[sinc]\nquorum = 1", "sinc: is unknown (did you mean [sync]"),
        ("[zzz]\nquorum = 1", "zzz: is unknown (sections are run, model"),
        # a value out of its range
        ("[sync]\nquorum = 0", "sync.quorum: must be at least 1, not 0"),
        ("[sync]\nquorum = 3", "sync.quorum: 3 is more than the number of regions, 2 (1 to 2)"),
        ("[sync]\ngrace_safety = 1.01", "sync.grace_safety: must be at most 1, not 1.01"),
        ("[sync]\ngrace_safety = -0.1", "sync.grace_safety: must be at least 0, not -0.1"),
        ("[sync]\nalpha = 1.0", "sync.alpha: must be less than 1, not 1.0"),
        ("[sync]\nfragments = 0", "sync.fragments: must be at least 1, not 0"),
        ("[inner]\nlr = 0", "inner.lr: must be more than 0, not 0"),
        ('[sync]\nmembership_lease = "0s"', "sync.membership_lease: must be more than 0, not 0.0"),
        # sizes that no machine has
        ("[model]\ndim = 1000000000", "model.dim: must be at most 65536, not 1000000000"),
        ("[model]\nlayers = 100000000", "model.layers: must be at most 1024, not 100000000"),
        ("[model]\nvocab = 1000000000", "model.vocab: must be at most 4194304, not 1000000000"),
        ("[model]\nhidden = 1000000000", "model.hidden: must be at most 1048576, not 1000000000"),
        ("[model]\nsequence_length = 1000000000", "model.sequence_length: must be at most 1048576, not 1000000000"),
        ("[sync]\nfragments = 60000", "sync.fragments: must be at most 1024, not 60000"),
        ("[sync]\nperiod_steps = 1" + "0" * 40, "sync.period_steps: must be at most 1000000000, not 1000"),
        ('[syncer]\nsnapshot_every = "9000h"', "syncer.snapshot_every: must be at most 31536000"),
        # a word that isn't known
        ('[wire]\ncodec = "int5"', "wire.codec: must be 'f32', 'bf16', 'int8', 'int4' or 'e3m0', not the text 'int5'"),
        ('[wire]\ncodec = "in4"', 'did you mean "int4"'),
        ('[outer]\nmerge = "meen"', "outer.merge: must be 'mean' or 'rda', not the text 'meen' (did you mean \"mean\""),
        ('[sync]\ntopology = "ring"', "sync.topology: must be 'star', not the text 'ring'"),
        ('[data]\nsource = "stou"', 'data.source: \'stou\' isn\'t a source (sources are "sotu" and "text:PATH"'),
        ('[data]\nsource = "text:"', "data.source: 'text:' isn't a source"),
        # a quantity without, or with a wrong, unit
        ("[wire]\nchunk_bytes = 1e8", "wire.chunk_bytes: 100000000.0 has no unit"),
        ('[wire]\nchunk_bytes = "512kb"', "wire.chunk_bytes: '512kb' isn't a size (write it like \"2GiB\""),
        ('[syncer]\nsnapshot_every = "5 sec"', "syncer.snapshot_every: '5 sec' isn't a duration"),
        ("[evaluation]\ntokens = 1.5", "evaluation.tokens: 1.5 isn't a whole number"),
        ('[evaluation]\ntokens = "many"', "evaluation.tokens: 'many' isn't a count"),
        # an address
        ('[syncer]\nlisten = "here"', "syncer.listen: 'here' isn't an address (write it like"),
        ('[syncer]\nlisten = "host:99999"', "syncer.listen: 'host:99999' isn't an address"),
        ('[syncer]\nlisten = ""', "syncer.listen: '' isn't an address"),
        # relations
        ("[sync]\noverlap_steps = 24", "sync.overlap_steps: 24 isn't less than sync.period_steps, 24"),
        ("[sync]\noverlap_steps = 0", "sync.quorum: lockstep (sync.overlap_steps = 0) needs all 2 regions, not 1"),
        ("[sync]\noverwritten_steps_max = 1", "sync.overwritten_steps_max: 1 is less than sync.overlap_steps, 2"),
        ("[inner]\nbatch_tokens = 1000", "inner.batch_tokens: 1000 isn't a multiple of 128"),
        ("[inner]\naccumulation = 3", "inner.batch_tokens: 1024 isn't a multiple of 384"),
        ('[inner]\nbatch_tokens = "128M"', "run.tokens: 1000000 tokens are less than one step"),
        ("[model]\nheads = 5", "model.dim: 64 isn't a multiple of 5 heads (model.heads must divide it"),
        ("[model]\nheads = 64", "model.dim: 64 over 64 heads leaves 1 for each, which is odd"),
        ("[unlisted]\nlearners_max = 2", "data.shards: must be more than 2 where unlisted.learners_max lets"),
        ("[unlisted]\nranks = 3", "unlisted.ranks: 3 ranks can't share 8 sequences evenly"),
        ("[unlisted]\nlearners_max = 257", "unlisted.learners_max: must be at most 256, not 257"),
        (
            "[unlisted]\nlearners_max = 2\n[data]\nshards = 4\n[sync]\noverlap_steps = 0\nquorum = 2",
            "unlisted.learners_max: must be 0 in lockstep",
        ),
    ],
)
def test_a_bad_setting_is_refused_by_name(tmp_path: Path, setting: str, sentence: str) -> None:
    assert sentence in refusal(tmp_path, f"{RUN}{setting}\n{REGIONS}")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (REGIONS, "run: is missing"),
        (f"[run]\n{REGIONS}", "run.tokens: is missing"),
        (RUN, "regions: is missing"),
        (f"[run]\ntokens = 9999999999999999999\n{REGIONS}", "run.tokens: must be at most"),
        (f'{RUN}[syncer]\nlisten = "0.0.0.0:7000"\n{REGIONS}', "syncer.listen: 0.0.0.0:7000 is reachable from outside"),
        (f'{RUN}[syncer]\nlisten = "syncer.example.org:7000"\n{REGIONS}', "or set syncer.insecure = true"),
        (f"regions = []\n{RUN}", "regions: must have at least 1 entry"),
        (f"regions = 5\n{RUN}", "regions: must be a list, not 5"),
        (f"regions = [5]\n{RUN}", "regions[0]: must be a table, not 5"),
        (f"quorum = 1\n{RUN}{REGIONS}", "quorum: is unknown (did you mean sync.quorum"),
        (f"outer_lr = 0.7\n{RUN}{REGIONS}", "outer_lr: is unknown (did you mean outer.lr"),
        (f"sync = 5\n{RUN}{REGIONS}", "sync: must be a table, not 5"),
        (f'[run]\ntokens = "1M"\nname = "a/b"\n{REGIONS}', "run.name: the text 'a/b' doesn't match"),
        (f"{RUN}{REGIONS}uplnk = 5", "regions.eu-west.uplnk: is unknown (did you mean regions.uplink"),
        (f"{RUN}{REGIONS}uplink = 1e8", "regions.eu-west.uplink: 100000000.0 has no unit"),
        (f'{RUN}{REGIONS}uplink = "0mbit"', "regions.eu-west.uplink: must be more than 0, not 0.0"),
        (f'{RUN}{REGIONS}address = "nowhere"', "regions.eu-west.address: 'nowhere' isn't an address"),
        (f"{RUN}{REGIONS}ranks = 3", "regions.eu-west.ranks: 3 ranks can't share 8 sequences evenly"),
        (f"{RUN}{REGIONS}[[regions]]\nname = 'us-east'", "regions: 2 regions are called 'us-east'"),
        (f"{RUN}[[regions]]\nranks = 1", "regions[0].name: is missing"),
        (f"{RUN}[[regions]]\nname = ''", "regions[0].name: '' isn't a region's name"),
        (f"{RUN}[[regions]]\nname = 'US'", "regions.US.name: 'US' isn't a region's name (1 to 63 of a-z, 0-9 and -"),
        (f"{RUN}[[regions]]\nname = '{'a' * 64}'", "isn't a region's name"),
        (f'{RUN}{REGIONS}step_time_min = "2000h"', "regions.eu-west.step_time_min: must be at most 86400, not"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in refusal(tmp_path, text)


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, f'{RUN}[sync]\nquorum = 0\n[inner]\nlr = "x"\n{REGIONS}')
    assert "sync.quorum: must be at least 1" in sentence
    assert "inner.lr: must be a number" in sentence


def test_all_broken_relations_are_said_at_once(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, f"{RUN}[sync]\nquorum = 9\noverlap_steps = 30\n{REGIONS}")
    assert "sync.quorum: 9 is more than" in sentence
    assert "sync.overlap_steps: 30 isn't less" in sentence


def test_a_long_value_is_cut_short(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, f'{RUN}[inner]\nlr = "{"x" * 10_000}"\n{REGIONS}')) < 300


def test_a_syntax_error_names_the_file_and_the_line(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, f"{RUN}lr = = 5\n")
    assert "run.toml: isn't TOML" in sentence
    assert "line 3" in sentence


def test_broken_json_names_the_file_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{\n"run": ,\n}')
    with pytest.raises(ConfigError, match=r"run\.json:2: isn't JSON"):
        load_config([file], env={})


def test_json_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="must be a table"):
        load_config([file], env={})


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: can't be read: No such file"):
        load_config([tmp_path / "missing.toml"], env={})
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        load_config([tmp_path], env={})
    (tmp_path / "latin.toml").write_bytes(b'[run]\nname = "\xff"\n')
    with pytest.raises(ConfigError, match=r"latin\.toml: isn't UTF-8 at byte 14"):
        load_config([tmp_path / "latin.toml"], env={})


@pytest.mark.parametrize("region", ["uplnk = 5", 'uplink = "0mbit"', "name = 7"])
def test_a_bad_region_is_not_also_a_missing_one(tmp_path: Path, region: str) -> None:
    sentence = refusal(tmp_path, f"{RUN}[[regions]]\n{region}\n")
    assert "regions[0]." in sentence
    assert "at least 1 entry" not in sentence


def test_what_is_no_regular_file_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path / "pipe.toml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="isn't a regular file"):
            load_config([path], env={})


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "weights.toml").open("wb") as file:
        file.truncate(5 * 1024 * 1024)
    with pytest.raises(ConfigError, match="too large to be a configuration"):
        load_config([tmp_path / "weights.toml"], env={})


@pytest.mark.parametrize("override", ["quorum=1", "sync.quorum", "=1", "sync.=1", ".quorum=1"])
def test_a_malformed_flag_is_refused(tmp_path: Path, override: str) -> None:
    assert "isn't section.key=value" in refusal(tmp_path, RUN + REGIONS, override)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sync.quorum=0", "sync.quorum: must be at least 1, not 0 (set by flag --set)"),
        ("sync.quorom=1", "sync.quorom: is unknown (did you mean sync.quorum; set by flag --set)"),
        ("snc.quorum=1", "snc: is unknown (did you mean [sync]; set by flag --set)"),
        ("inner.lr='1e-4'", "inner.lr: must be a number, not the text '1e-4'"),
        ("inner.lr=fast", "inner.lr: must be a number, not the text 'fast'"),
        ("a.b.c=1", "a.b.c: isn't a setting"),
        ("regions.uplink=1mbit", "regions.uplink: name the region"),
        ("regions.us-est.uplink=1mbit", "regions.us-est: no such region (did you mean us-east; set by flag --set)"),
        ("regions.mars.uplink=1mbit", "regions.mars: no such region (regions are us-east, eu-west"),
    ],
)
def test_a_bad_flag_is_named_as_the_culprit(tmp_path: Path, override: str, sentence: str) -> None:
    assert sentence in refusal(tmp_path, RUN + REGIONS, override)


def test_a_flag_for_a_section_that_a_file_broke_is_refused(tmp_path: Path) -> None:
    assert "isn't in a table" in refusal(tmp_path, f"sync = 5\n{RUN}{REGIONS}", "sync.quorum=1")


def test_a_flag_for_a_region_without_any_region_is_refused(tmp_path: Path) -> None:
    assert "regions are none" in refusal(tmp_path, RUN, "regions.a.uplink=1mbit")


def test_what_is_no_table_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a table, not \\[\\]"):
        parse_config([])  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["foo", "http://x:1", "x:99999", ":::", "x:0", "a b:1"])
def test_an_address_where_nobody_can_be_is_refused(address: str) -> None:
    assert why_no_address(address)


@pytest.mark.parametrize("address", ["x:1", "sub.domain.example:7000", "10.0.0.1:65535", "[::1]:7000", "::1:7000"])
def test_an_address_of_a_name_or_of_numbers_is_one(address: str) -> None:
    assert not why_no_address(address)
