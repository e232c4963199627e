"""The configuration: every fault named with its place, before anything heavy is touched."""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from deployments.api.caller import KeyRule
from deployments.config import yaml_lines
from deployments.config.keys import ApiKey, key_digest, read_api_keys
from deployments.config.load import (
    MantaConfig,
    environment_names,
    load_config,
    parse_config,
)
from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "manta.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def faults(folder: Path, text: str) -> list[str]:
    """Return the problems of a configuration file, without the path in front."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    return [line.removeprefix(f"{path}:") for line in caught.value.message.splitlines()]


def test_all_keys_have_defaults(tmp_path):
    """A demo that needs a page of settings."""
    config = load_config(write(tmp_path, "model: default"), {})
    assert config == MantaConfig() == parse_config(environment={})
    assert MantaConfig().http.host == "127.0.0.1"


@pytest.mark.parametrize("text", ["", "\n", "# model: default\n", "---\n", "null\n"])
def test_a_file_with_nothing_in_it_is_refused(tmp_path, text):
    """Bug: a file that was cut short, or another than was meant, served the small default model."""
    (fault,) = faults(tmp_path, text)
    assert fault.endswith("there is nothing in it; the least is `model: default`")


def test_more_gpus_than_an_engine_uses_are_refused(tmp_path):
    """Bug: `num_gpus: 2` reserved two GPUs for each replica and used one, without a word."""
    for gpus in (2, 1.5):
        (fault,) = faults(tmp_path, f"pools:\n  gpu: {{num_gpus: {gpus}}}")
        assert "an engine uses a GPU for each rank" in fault and "more replicas" in fault
    for gpus in (0.5, 1, 64):
        (fault,) = faults(tmp_path, f"pools:\n  cpu: {{num_gpus: {gpus}}}")
        assert f"pools.cpu.num_gpus is {gpus}" in fault and "take pools.gpu" in fault
    for gpus in (0, 0.25, 1):
        pools = load_config(write(tmp_path, f"pools:\n  gpu: {{num_gpus: {gpus}}}"), {}).pools
        assert pools["gpu"].num_gpus == gpus


@pytest.mark.parametrize("key", ["tensor_parallel", "pipeline_parallel"])
@pytest.mark.parametrize(
    "pool, why",
    [
        ("gpu: {num_gpus: 1}", "num_gpus is 1 and tensor_parallel 2: each rank needs a GPU"),
        ("gpu: {num_gpus: 0.5}", "num_gpus is 0.5 and tensor_parallel 2: each rank needs a GPU"),
        ("gpu: {num_gpus: 3}", "num_gpus is 3 and tensor_parallel 2: an engine uses a GPU for"),
        ("cpu: {num_cpus: 1}", "num_cpus is 1 and tensor_parallel 2: each rank needs a core"),
    ],
)
def test_a_reservation_that_does_not_suit_the_ranks_is_refused(tmp_path, pool, why, key):
    """Bug: Ray gives a replica one GPU, and its second rank fails at the start, or shares it."""
    (fault,) = faults(tmp_path, f"engine: {{{key}: 2}}\npools:\n  {pool}")
    assert why.replace("tensor_parallel", key) in fault
    if "num_gpus: 3" in pool:
        both = "engine: {tensor_parallel: 2, pipeline_parallel: 2}"
        (fault,) = faults(tmp_path, f"{both}\npools:\n  {pool}")
        assert "num_gpus is 3 and tensor_parallel 2 x pipeline_parallel 2: each rank" in fault
    load_config(write(tmp_path, f"engine: {{{key}: 2}}\npools: {{gpu: {{}}, cpu: {{}}}}"), {})


def test_a_replica_on_several_nodes_is_one_placement_group(tmp_path):
    """Bugs: GPUs of all ranks are asked for on one node; all stages are placed on one; what is on
    another node is placed without the pool's labels; a pool that has one stage of its own starts,
    and never gets ready."""
    from deployments.serve.model_deployments import NodeCapacity, engine_deployments

    engine = "engine: {tensor_parallel: 2, pipeline_parallel: 4, pipeline_nodes: 2}"
    pool = "{labels: {pool: pairs}, resources: {a: 0.5}}"
    config = load_config(write(tmp_path, f"{engine}\npools: {{gpu: {pool}}}"), {})
    (application,) = engine_deployments(config, NodeCapacity(8, 8))
    built = application._bound_deployment._replica_config
    bundle = {"CPU": 4.0, "GPU": 4.0, "a": 0.5}
    assert built.placement_group_bundles == [bundle, bundle]
    assert built.placement_group_strategy == "STRICT_SPREAD"
    assert built.placement_group_bundle_label_selector == [{"pool": "pairs"}] * 2
    actor = built.ray_actor_options
    assert (actor["num_gpus"], actor["num_cpus"], actor["resources"]) == (4, 4, {"a": 0.5})
    assert "label_selector" not in actor
    for item, why in (
        ("gpu: {num_gpus: 2}", "num_gpus is 2 and .* on pipeline_nodes 2, 4 on each: each rank"),
        ("gpu: {num_gpus: 8}", "an engine uses a GPU for each rank"),
        ("cpu: {engine: {pipeline_parallel: 1}}", "engine.pipeline_nodes is 2 and engine.pipe"),
    ):
        (fault,) = faults(tmp_path, f"{engine}\npools: {{{item}}}")
        assert re.search(why, fault)
    (fault,) = faults(tmp_path, "engine: {pipeline_parallel: 3, pipeline_nodes: 2}")
    assert "2 nodes cannot have equally many of pipeline_parallel 3 stages" in fault


def test_the_longest_answer_reaches_the_routers():
    """Bug: a key that is read and never told to those who would obey it."""
    from deployments.app import build_routers

    for limits, most in (({}, None), ({"max_tokens": 7}, 7)):
        bound = build_routers({"limits": limits})._bound_deployment
        assert bound.init_args[0].max_tokens == most


def test_all_problems_at_once_with_line_key_and_nearest_name(tmp_path):
    """One error a try; a misspelt key that is silently ignored."""
    fault = faults(
        tmp_path,
        """\
        modle: default
        engine:
          blok_size: 3
          block_size: "16"
          dtype: float8
        router:
          replicas: two
        http: {prot: 8000, port: 99999}
        pools:
          gpuu: {}
          cpu: {replica: 2, engine: {num_bloks: 1}}
        zzz: 1
        """,
    )
    assert fault == [
        "1: modle: unknown key; did you mean model?",
        "3: engine.blok_size: unknown key; did you mean block_size?",
        "4: engine.block_size: must be a valid integer, got '16'",
        "5: engine.dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', got 'float8'",
        "7: router.replicas: must be a valid integer, got 'two'",
        "8: http.port: must be less than or equal to 65535, got 99999",
        "8: http.prot: unknown key; did you mean port?",
        "10: pools.gpuu: unknown key; did you mean gpu?",
        "11: pools.cpu.engine.num_bloks: unknown key; did you mean num_blocks?",
        "11: pools.cpu.replica: unknown key; did you mean replicas?",
        "12: zzz: unknown key; known keys: " + ", ".join(MantaConfig.model_fields),
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("max_model_len: 9", "engine.max_model_len"),
        ("port: 9", "http.port or grpc.port"),
        ("api_keys_file: keys", "http.api_keys_file"),
        ("http: {max_model_len: 9}", "engine.max_model_len"),
        ("engine: {drain_seconds: 9}", "limits.drain_seconds"),
        ("tensor_parallel_size: 2", "engine.tensor_parallel"),
        ("pools: {cpu: {block_size: 9}}", "pools.cpu.engine.block_size or engine.block_size"),
        ("pools: {cpu: {engine: {num_cpus: 9}}}", "pools.cpu.num_cpus or "),
        ("models: {a: {seed: 9}}", "models.a.engine.seed or engine.seed"),
        ("models: {a: {port: 9}}", "http.port or grpc.port"),
        (
            "models: {a: {pools: {gpu: {seed: 9}}}}",
            "models.a.pools.gpu.engine.seed or models.a.eng",
        ),
    ],
)
def test_a_key_in_a_wrong_place_is_told_its_right_one(tmp_path: Path, text: str, hint: str) -> None:
    """A list of thirty keys for somebody who wrote `max_model_len` without `engine`."""
    (fault,) = faults(tmp_path, text)
    assert f": unknown key; did you mean {hint}" in fault


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("engine: {memory_fraction: 2}", 1, "engine.memory_fraction: memory_fraction must be in"),
        ("\nengine:\n  block_size: 0", 3, "engine.block_size"),
        ("replicas: 0", 0, "nothing would ever answer"),
        ("replicas: 2\npools: {cpu: {}}", 0, "replicas and pools are both set"),
        ("pools: {cpu: {replicas: 0}}", 0, "nothing would ever answer"),
        (
            "pools:\n  cpu: {min_replicas: 3, max_replicas: 2}",
            2,
            "min_replicas is above max_replicas",
        ),
        ("pools:\n  cpu:\n    engine: {seed: 7}", 2, "set it under the top level's engine"),
        (
            "pools:\n  cpu:\n    engine: {generation_config: none}",
            2,
            "engine.generation_config: a request may move from pool to pool",
        ),
        ("router:\n  silence_seconds: 0.9", 1, "heartbeat_seconds"),
        ("http:\n  store_bytes: 9", 0, "http.store_bytes is set and router.replicas is 2"),
        (
            "http:\n  store_bytes: 9\nrouter: {replicas: 1, batch_replicas: 1}\nbatch: {folder: b}",
            0,
            "batch.folder and router.batch_replicas are set",
        ),
        ("replicas: -1", 1, "replicas"),
        ("replicas: 1.5", 1, "replicas"),
        ("replicas: yes", 1, "got 'yes'"),
        ("http:\n  strict: 1", 2, "http.strict"),
        ("engine: []", 1, "engine"),
        (
            "engine:\n  speculation: 7",
            2,
            "engine.speculation: must be auto, off or a mapping such as {method: lookup",
        ),
        ("engine:\n  speculation: {tokens: [1]}", 2, "engine.speculation: must be auto, off or a"),
        ("served_name: ../x", 1, "served_name"),
        ("aliases: ['claude-*', 'a b']", 1, "'a b' is no name of a model"),
        ("model: 5", 1, "model"),
        ("- a\n- b", 0, "must be a mapping"),
        ("just text", 0, "must be a mapping"),
    ],
)
def test_bad_values_name_line_and_key(tmp_path, text, line, part):
    """A message that leaves the reader to search the file."""
    (fault,) = faults(tmp_path, text)
    assert part in fault
    if line:
        assert fault.startswith(f"{line}: ")


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("a: &x [1]\nb: *x", 1, "anchor"),
        ("model: *x", 1, "alias"),
        ("model: !!python/object/apply:os.system ['true']", 1, "tag"),
        ("model: !ruby/object {}", 1, "tag"),
        ("model: default\n---\nmodel: default", 2, "second document"),
        ("engine:\n\tblock_size: 16", 2, "a tab"),
        ("replicas: 1\nreplicas: 2", 2, "a second time; first in line 1"),
        ("replicas: .inf", 1, "finite"),
        ("replicas: 1" + "0" * 5000, 1, "digits"),
        ("model: " + "[" * 5000, 1, "deep"),
        ("model: [1, 2", 1, "expected"),
        ("? [a]\n: 1", 1, "plain word"),
        ("model: \x07", 0, ""),
    ],
)
def test_yaml_that_bites(tmp_path, text, line, part):
    """Bombs, objects and ambiguities of YAML; a traceback instead of a message."""
    (fault,) = faults(tmp_path, text)
    assert part in fault
    if line:
        assert fault.startswith(f"{line}: ")


def test_files_that_are_no_configuration(tmp_path):
    """Fifty megabytes parsed for a minute; a traceback for a folder."""
    for content, part in (
        (b"a: 1\n" * 10**7, "more than"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"\xef\xbb\xbfreplicas: 0", "ever answer"),  # a byte order mark is no fault
    ):
        path = tmp_path / "x.yaml"
        path.write_bytes(content)
        began = time.monotonic()
        with pytest.raises(ConfigError, match=part):
            load_config(path, {})
        assert time.monotonic() - began < 1
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            load_config(path, {})


def test_every_value_of_the_core_schema():
    """`no` as False, `010` as 8, `1_000` as a number: YAML 1.1 surprises."""
    text = "[1, -2, 0x10, 1.5, 1e3, .5, true, null, ~, '1', no, 010, 1_000, 12:30, a b]"
    values = [1, -2, "0x10", 1.5, 1000.0, 0.5, True, None, None, "1", "no", 10, "1_000", "12:30"]
    assert yaml_lines.parse(text).data == [*values, "a b"]


def model_folder(folder: Path, **config) -> Path:
    folder.mkdir()
    values = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "model_type": "llama",
    }
    (folder / "config.json").write_text(json.dumps({**values, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_the_model_folder_is_checked_first(tmp_path):
    """A typo in a path that shows after minutes, in a replica's log, as a restart loop."""
    assert "no such folder" in faults(tmp_path, "model: ./absent")[0]
    (tmp_path / "empty").mkdir()
    (fault,) = faults(tmp_path, "replicas: 1\nmodel: empty")
    assert fault.startswith("2: model: ") and "config.json" in fault
    model_folder(tmp_path / "odd", architectures=["LammaForCausalLM"])
    (fault,) = faults(tmp_path, "model: odd")
    assert "LammaForCausalLM" in fault and "LlamaForCausalLM" in fault
    good = model_folder(tmp_path / "good")
    config = load_config(write(tmp_path, "model: good"), {})
    assert config.model == str(good), "relative to the file"
    assert config.name() == "good"


def test_faults_show_quickly_and_touch_nothing_heavy(tmp_path):
    """Two seconds of imports, or a GPU taken, before the message about a typo."""
    path = write(tmp_path, "modle: default")
    code = (
        "import sys\nfrom deployments.config.load import load_config\n"
        "from engine.errors import ConfigError\n"
        f"try: load_config({str(path)!r})\nexcept ConfigError as error: print(error)\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    began = time.process_time(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd()
    )
    assert done.stdout.splitlines() == [
        f"{path}:1: modle: unknown key; did you mean model?",
        "[]",
    ]
    assert time.monotonic() - began[1] < 4, "under two seconds on a machine that does nothing else"


def test_environment_overrides_single_values_and_typos_are_told(tmp_path, caplog):
    """MANTA_HTTP_PRT=80 that does nothing, silently; a secret second configuration."""
    path = write(tmp_path, "http: {port: 9000}")
    variables = {
        "MANTA_HTTP_PORT": "9001",
        "MANTA_ENGINE_BLOCK_SIZE": "8",
        "MANTA_REPLICAS": "2",
        "MANTA_HTTP_PRT": "80",
        "MANTA_CACHE": "/x",
        "HOME": "/",
    }
    config = load_config(path, variables)
    assert (config.http.port, config.engine, config.replicas) == (9001, {"block_size": 8}, 2)
    assert [record.message for record in caplog.records] == [
        "environment variable MANTA_HTTP_PRT means nothing to Manta; did you mean MANTA_HTTP_PORT?"
    ]
    with pytest.raises(ConfigError, match="replicas"):
        load_config(path, {"MANTA_REPLICAS": "many"})
    assert len(environment_names()) > 40


def test_key_files_of_others_are_refused(tmp_path):
    """API keys that every user of the machine can read; an empty file that lets everybody in."""
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys(path)
    path.write_text("# comment\n\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="no key"):
        read_api_keys(path)
    path.write_text("# comment\nabc\n  def  \n")
    assert read_api_keys(path) == (ApiKey(key_digest("abc")), ApiKey(key_digest("def")))
    path.chmod(0o644)
    (fault,) = faults(tmp_path, "http:\n  api_keys_file: keys")
    assert fault.startswith("2: http.api_keys_file: ") and "chmod 600" in fault


def test_a_key_may_have_rights_and_limits(tmp_path):
    """A right that is read as a part of the key, which then opens nothing; a key that is kept as
    its digest and opens nothing, either."""
    path = tmp_path / "keys"
    path.write_text(
        f"abc\n\ndef  priority=-8\nsha256:{key_digest('ghi')} name=team models=tiny,legal-* "
        "requests=60 tokens=1000 budget=5000/day\n"
    )
    path.chmod(0o600)
    rule = KeyRule("team", ("tiny", "legal-*"), 60, 1000, 5000, "day")
    assert read_api_keys(path) == (
        ApiKey(key_digest("abc")),
        ApiKey(key_digest("def"), KeyRule(priority=-8)),
        ApiKey(key_digest("ghi"), rule),
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("secret priority", "the value of priority= is not understood"),
        ("secret priority=high", "the value of priority= is not understood"),
        ("secret admin", "word 1 behind the key is not understood; behind"),
        ("secret priority=1 x", "word 2 behind the key is not understood"),
        ("secret model=llama", "word 1 .* not understood; did you mean models=?"),
        ("secret tokens=0", "tokens= is not understood"),
        ("secret budget=5", "budget= is not understood; .* budget=<tokens>/day"),
        ("secret models=", "models= is not understood"),
        ("sha256:secret", "64 hexadecimal digits"),
        ("abc", "this key is in line 1"),
        ("secret name=x", "the name x is in line 1"),
    ],
)
def test_a_fault_in_a_keys_file_has_its_line_and_no_key(tmp_path, line, told):
    """A line that is told in the error, with the key in it."""
    path = tmp_path / "keys"
    path.write_text(f"abc name=x\n{line}\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=rf"keys:2: .*{told}") as no:
        read_api_keys(path)
    assert "secret" not in no.value.message


def test_every_engine_option_can_be_set_and_every_knob_says_why():
    """A new field of EngineConfig that the file cannot reach; a default without its reason."""
    for field in msgspec.structs.fields(EngineConfig):
        if field.name in ("model", "revision", "log_level"):
            continue
        value = list(field.default) if isinstance(field.default, tuple) else field.default
        assert parse_config({"engine": {field.name: value}}, {}).engine == {field.name: value}

    def check(section, name):
        for key, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and hasattr(kind, "model_fields"):
                check(kind, f"{name}.{key}")
            else:
                assert field.description and len(field.description) > 12, f"{name}.{key}"

    check(MantaConfig, "")


def test_a_configuration_survives_a_round_trip():
    """A Serve config file whose arguments build something else than the file they came from."""
    data = {
        "model": "default",
        "engine": {"block_size": 8, "graph_sizes": [1, 2]},
        "pools": {"cpu": {"replicas": 2, "num_cpus": 0.5, "labels": {"pool": "cpu"}}},
        "http": {"port": 9000},
    }
    config = parse_config(data, {})
    again = parse_config(json.loads(json.dumps(config.model_dump(exclude_unset=True))), {})
    assert again == config


def test_os_environ_is_the_default(monkeypatch):
    """An override that works in tests only."""
    monkeypatch.setitem(os.environ, "MANTA_HTTP_PORT", "9876")
    assert parse_config({}).http.port == 9876
