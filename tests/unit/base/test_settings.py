"""Settings: one definition serves flag, key and variable; the precedence is flag > environment > file > default."""

import random

import msgspec
import pytest

from sayfa.base.config import PARTS, EngineConfig, Settings
from sayfa.base.errors import ConfigError
from sayfa.base.settings import describe, docs, engine_config, fields, load, parse
from sayfa.server.auth import Keys


def sample(field, rng):
    """A value other than the default, as text and as it must be parsed."""
    if field.kind == "choice":
        value = rng.choice([choice for choice in field.choices if choice != field.default] or list(field.choices))
        return str(value), value
    if field.kind == "bool":
        return ("false", False) if field.default else ("true", True)
    if field.kind == "list":
        return "one,two", ["one", "two"]
    if field.unit is None:
        return "text", "text"
    low, high = field.unit.low, min(field.unit.high, field.unit.low + 5000)
    value = rng.uniform(low, high) if field.kind == "float" else rng.randint(int(low), int(high))
    return repr(value), value


ALONE = [name for name in fields() if not name.startswith("ssl_")]


@pytest.mark.parametrize("name", ALONE)
def test_flag_wins_over_variable_wins_over_file_wins_over_default(name):
    field = fields()[name]
    rng = random.Random(name)
    options = {}
    if name == "host":
        options = {"insecure_no_auth": "true"}
    if name in ("max_num_seqs", "max_num_batched_tokens"):
        options = {
            "max_num_batched_tokens" if name == "max_num_seqs" else "max_num_seqs": {"max_num_seqs": "9999"}.get(
                name, "1"
            )
        }
    text, value = sample(field, rng)
    other = "false" if text == "true" else "true" if text == "false" else text
    get = lambda settings: getattr(getattr(settings, field.part), name)  # noqa: E731
    assert get(load(options, {})) == field.default
    assert get(load(options, {}, {field.key: text}, "s.yaml")) == value
    assert get(load(options, {field.variable: text}, {name: other})) == value
    settings = load({**options, name: text}, {field.variable: other}, {field.key: other})
    assert get(settings) == value
    assert settings.origins[name] == "flag"


def test_every_field_has_a_text_and_no_name_stands_twice():
    names = [name for part in PARTS.values() for name in part.__struct_fields__]
    assert len(names) == len(set(names)) == len(fields())
    for name in names:
        assert len(docs()[name].split()) >= 4, f"{name} has no text below it that explains it"


def test_defaults_lie_in_their_own_ranges():
    for field in fields().values():
        if field.default not in (None, [], ""):
            assert parse(field, field.default, field.flag) == field.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_model_len", "4k", 4000), ("max_model_len", "4K", 4096), ("max_model_len", 5000, 5000),
        ("max_num_batched_tokens", "1.5k", 1500), ("kv_cache_memory", "4GiB", 4 << 30),
        ("kv_cache_memory", "1.5 GiB", 3 << 29), ("kv_cache_memory", "2gb", 2 * 10**9),
        ("kv_cache_memory", "536870912", 1 << 29), ("block_size", 16, 16), ("offline", "yes", True),
        ("offline", "0", False), ("offline", True, True), ("api_key", "a, b", ["a", "b"]), ("threads", "", None),
        ("shutdown_timeout", 2, 2.0), ("uds", "/tmp/x", "/tmp/x"), ("port", "0", 0),
        ("max_num_queued_tokens", "1_000", 1000), ("kv_cache_memory_share", ".5", 0.5),
        ("kv_cache_memory_share", "0.05", 0.05),
    ],
)  # fmt: skip
def test_forms_of_values(name, text, value):
    assert parse(fields()[name], text, "x") == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "80a"), ("port", -1), ("port", 65536), ("port", True), ("port", 1.5), ("port", "nan"), ("port", ""),
        ("port", [1]), ("port", None), ("max_model_len", "0"), ("max_model_len", 1), ("max_model_len", "4q"),
        ("max_model_len", "-4k"),
        ("kv_cache_memory", "1KB"), ("kv_cache_memory", "4 parsec"), ("kv_cache_memory_share", 0.0),
        ("kv_cache_memory_share", float("nan")), ("kv_cache_memory_share", float("inf")), ("block_size", "24"),
        ("block_size", True), ("offline", "maybe"), ("api_key", ["a", ""]), ("api_key", [["a"]]), ("api_key", "a,,b"),
        ("dtype", "float16"), ("host", {"a": 1}), ("model", "a\x00b"), ("model", 5), ("revision", 1.1),
        ("api_key", {"a": 1}), ("api_key", 5), ("api_key", ["a", 1.1]), ("api_key", ["a", None]), ("port", "010"),
        ("port", "1" * 5000), ("port", "8\u0660\u0660\u0660"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_used_are_refused_with_their_source(name, value):
    with pytest.raises(ConfigError, match=r"^here"):
        parse(fields()[name], value, "here")


LISTS = [field for field in fields().values() if field.kind == "list"]


@pytest.mark.parametrize("field", LISTS, ids=lambda field: field.name)
def test_a_list_takes_several_flags_or_commas_and_a_text_in_any_source_is_split_alike(field):
    get = lambda settings: getattr(getattr(settings, field.part), field.name)  # noqa: E731
    for given in (["a,b", "c"], ["a", "b", "c"], ["a, b ,c"]):
        assert get(load({field.name: given}, {})) == ["a", "b", "c"]
    assert get(load({}, {field.variable: "a,b, c"})) == ["a", "b", "c"]
    assert get(load({}, {}, {field.key: "a,b, c"})) == ["a", "b", "c"]
    for given in (["a,"], ["a", ""], [",a"], [","]):
        with pytest.raises(ConfigError, match=f"{field.flag} holds an entry that is empty"):
            load({field.name: given}, {})
    assert get(load({field.name: []}, {})) == []


def test_an_entry_of_a_list_in_a_file_or_of_llm_is_taken_whole():
    names = ["llama, the large one", "b"]
    assert load({}, {}, {"served-model-name": names}).model.served_model_name == names
    assert engine_config({"served_model_name": names}).model.served_model_name == names


def test_an_unknown_name_stops_the_start_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"s\.yaml: unknown key 'max-num-seq'; did you mean 'max-num-seqs'"):
        load({}, {}, {"max-num-seq": 3}, "s.yaml")
    with pytest.raises(ConfigError, match=r"SAYFA_MAX_NUM_SEQ; did you mean 'SAYFA_MAX_NUM_SEQS'"):
        load({}, {"SAYFA_MAX_NUM_SEQ": "3"})
    with pytest.raises(ConfigError, match=r"'max_num_seq'; did you mean 'max_num_seqs'"):
        engine_config({"max_num_seq": 3})


def test_a_key_that_stands_twice_in_two_spellings_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        load({}, {}, {"max-num-seqs": 3, "max_num_seqs": 4})


def test_what_kubernetes_injects_for_a_service_called_sayfa_is_told_apart():
    injected = {
        "SAYFA_SERVICE_HOST": "10.0.0.1", "SAYFA_SERVICE_PORT": "80", "SAYFA_SERVICE_PORT_HTTP": "80",
        "SAYFA_PORT_80_TCP": "tcp://10.0.0.1:80", "SAYFA_PORT_80_TCP_ADDR": "10.0.0.1",
        "SAYFA_GATEWAY_SERVICE_HOST": "10.0.0.2", "SAYFA_GATEWAY_SERVICE_PORT_HTTP": "80",
        "SAYFA_GATEWAY_PORT": "tcp://10.0.0.2:80", "SAYFA_METRICS_PORT_9090_TCP": "tcp://10.0.0.2:9090",
    }  # fmt: skip
    assert load({}, injected) == load({}, {})
    with pytest.raises(ConfigError, match="unknown environment variable SAYFA_METRICS_PORT"):
        load({}, {"SAYFA_METRICS_PORT": "9090"})
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        load({}, {**injected, "SAYFA_PORT": "tcp://10.0.0.1:80"})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
def test_an_address_that_others_reach_needs_a_key_or_the_word(host):
    with pytest.raises(ConfigError, match=r"insecure-no-auth|empty"):
        load({"host": host}, {})
    if host:
        load({"host": host, "api_key": ["k" * 32]}, {})
        load({"host": host, "insecure_no_auth": True}, {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_loopback_needs_no_key(host):
    assert load({"host": host}, {}).server.host == host


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"ssl_certfile": "a"}, "ssl-keyfile"), ({"ssl_keyfile": "a"}, "ssl-certfile"),
        ({"max_num_seqs": "600"}, "max-num-batched-tokens"), ({"api_key": ["clé"]}, "api-key"),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_refused(flags, word):
    with pytest.raises(ConfigError, match=word):
        load(flags, {})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("k" * 513, "513 characters long, more than the 512"), ("clé", "no HTTP header"), ("a\nb", "no HTTP header"),
        ("a\tb", "no HTTP header"), ("a\x7fb", "no HTTP header"), ("secret,b", "comma"), ("", "empty"), (" ", "empty"),
    ],
)  # fmt: skip
def test_a_key_that_no_client_could_send_stops_the_start(key, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load({}, {}, {"api-key": ["good", key]}, "s.yaml")
    assert "api-key" in str(caught.value)
    assert len(key) < 2 or key not in str(caught.value)


def test_a_key_that_a_start_accepts_opens_the_door():
    rng = random.Random(3)
    chars = [chr(code) for code in range(160)] + ["é", "\u2028", "\ud800"]
    usual = [char for char in chars[33:127] if char != ","]
    accepted = set()
    for length in [1, 2, 511, 512, 513, 514] * 100:
        key = "".join(rng.choices(usual if rng.random() < 0.7 else chars, k=length))
        try:
            keys = load({}, {}, {"api-key": [key]}).server.api_key
        except ConfigError:
            continue
        accepted.add(length)
        assert len(Keys(keys).tenant(f"Bearer {keys[0]}")) == 16
    assert accepted == {1, 2, 511, 512}


def test_keys_are_hidden_wherever_settings_are_shown():
    settings = load({"api_key": ["very-secret-key"]}, {})
    assert "very-secret-key" not in str(describe(settings))
    assert b"very-secret-key" not in msgspec.json.encode(settings.engine), "keys must not reach the engine"


def test_the_engines_parts_cross_as_json_and_come_back_equal():
    rng = random.Random(5)
    for _ in range(50):
        names = rng.sample([name for name, field in fields().items() if field.part != "server"], 6)
        options = {name: sample(fields()[name], rng)[0] for name in names}
        options["max_num_batched_tokens"] = 500_000
        config = engine_config(options)
        assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_settings_without_sources_are_the_defaults():
    assert load({}, {"HOME": "/root", "PATH": "x"}) == Settings()


def test_none_means_not_given_only_where_a_setting_may_be_absent():
    assert engine_config({"max_model_len": None}) == engine_config({})
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engine_config({"max_num_seqs": None})
