"""The table of breaks: small changes of the package that take a protection away, and the test that must notice.

Tried by `mutants`; docs/threat-model.md names them by class of attack. A break is a text that a file holds once, and
what takes its place. It is as small as the mistake that somebody could make.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """test: what must fail, as pytest names it, within tests/. told: what the failure must say (a pattern).

    Without `told` a test could fail for another reason: a file that cannot be imported, a machine that is too slow.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    told: str


_PARSER = "hostile/test_parsers.py::test_f11_a_parser_refuses_or_reads[{}]"
_WORDS = "hostile/test_parsers.py::test_an_empty_input_and_the_target_s_own_words_are_no_surprise[{}]"
_REFUSE = "hostile/test_time_to_refuse.py::test_f13_a_hostile_request_is_refused_at_once[{}]"
_STRICT = "hostile/test_http_bytes.py::test_t16_what_could_be_read_in_two_ways_is_refused[{}]"
_ENDLESS = "hostile/test_http_bytes.py::test_t16_what_never_ends_is_cut_off_before_it_costs_anything[{}]"
_STORM = "hostile/test_http_bytes.py::test_f10_damaged_connections[0]"
_RULE = "house/test_rules.py::test_the_package_keeps_the_rule[{}]"

MUTANTS = (
    # nothing read from outside can carry code
    Mutant("a pickle is opened", "base/host.py", "import os\n", "import os\nimport pickle\n",
           _RULE.format("dangerous_calls"), r"base/host\.py:\d+: imports pickle"),
    Mutant("what the model wrote is evaluated", "server/answer.py", "class Entry(NamedTuple):\n",
           'eval("1")\n\n\nclass Entry(NamedTuple):\n', _RULE.format("dangerous_calls"),
           r"server/answer\.py:\d+: calls eval"),
    Mutant("a pattern may explode", "server/edge.py", 're.compile(rb"[^A-Za-z0-9._:-]")',
           're.compile(rb"([^A-Z]+)+$")', _RULE.format("slow_patterns"), "nested repetition"),
    Mutant("a check is an assert", "server/serve.py", "    check_access(options)\n",
           "    assert check_access(options) is None\n", _RULE.format("asserts"), r"server/serve\.py:\d+: assert"),
    Mutant("a malformed message ends the process", "wire/codec.py",
           "return _to_engine.decode(payload)\n    except (msgspec.MsgspecError, ValueError, RecursionError)",
           "return _to_engine.decode(payload)\n    except KeyError", _PARSER.format("wire"),
           "ValidationError|DecodeError"),
    Mutant("a long frame is held", "wire/sockets.py", "self._to_skip = length\n", "self._to_skip = 0\n",
           _PARSER.format("frames"), r"BrokenStreamError|AssertionError"),
    Mutant("pickles are called weights", "models/formats/source.py", '_UNSAFE = (".bin", ', "_UNSAFE = (",
           "unit/test_safetensors.py::test_formats_that_can_carry_code_are_refused_with_the_way_out[pytorch_model.bin]",
           "can carry code"),
    Mutant("a model's code is fetched with it", "hub_download.py",
           "allow_patterns=_WANTED,\n                ignore_patterns=_UNWANTED,\n", "",
           "unit/test_hub.py::test_a_hub_id_is_fetched_once_without_anything_that_could_run_then_found_offline",
           r"code\.py"),
    # model files
    Mutant("bytes of no tensor are no damage", "base/gguf.py", "    _check_dense(reader, start, tensors, alignment)\n",
           "", "hostile/test_damage.py::test_f12_flips_of_header_bits_give_no_other_weights[gguf]",
           "other weights are loaded in silence"),
    Mutant("a GGUF file may end anywhere", "base/gguf.py", "if num_bytes > self.size - start:", "if False:",
           _PARSER.format("gguf"), r"struct\.error: unpack_from requires a buffer"),
    Mutant("a tensor may lie past the end", "base/gguf.py", "if tensor.offset + tensor.num_bytes > reader.size:",
           "if False:", _PARSER.format("gguf"), "AssertionError|assert .* == .*num_bytes"),
    Mutant("a shape may lie about its bytes", "models/formats/safetensors.py",
           "if math.prod(shape) * item_bytes != end - start:", "if False:", _PARSER.format("safetensors"),
           "AssertionError"),
    Mutant("a shape may be any list", "models/formats/safetensors.py", "if not _are_counts(shape, MAX_DIM) or ", "if ",
           _PARSER.format("safetensors"), "TypeError: (unsupported operand|can't multiply)"),
    Mutant("an index leads out of its folder", "models/formats/safetensors.py",
           'if not isinstance(file, str) or "/" in file or ', "if not isinstance(file, str) or ",
           "unit/test_safetensors.py::test_an_index_names_files_of_its_own_folder_only[../model-2.safetensors]",
           r"index\\?\.json"),
    Mutant("a link leads out of the model's folder", "models/formats/source.py", "    if not inside:\n",
           "    if False:\n",
           "unit/test_safetensors.py::test_a_link_that_leads_out_is_refused_but_the_hub_s_own_layout_is_not",
           "DID NOT RAISE"),
    Mutant("the checksum is not compared", "models/formats/checksum.py", "if found != wanted:", "if False:",
           "hostile/test_damage.py::test_t09_with_a_checksum_every_flip_is_refused[safetensors]",
           "DID NOT RAISE .*ModelError"),
    Mutant("config numbers have no type", "models/facts.py",
           "is_number = isinstance(value, int | float) and not isinstance(value, bool)", "is_number = True",
           _PARSER.format("config"), "TypeError: '<=?' not supported between"),
    Mutant("tags are used in settings", "cli/config_file.py", '"tags" if event.tag is not None else ""', '""',
           _WORDS.format("yaml"), "the input: b'!!timestamp'"),
    # templates and text
    Mutant("a template reaches every method", "text/template_sandbox.py",
           "return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS)", "return True",
           "unit/text/test_template_sandbox.py::test_no_way_leads_into_python", "assert '<class' not in"),
    Mutant("a product of text is free", "text/template_sandbox.py", "budget.chars(len(many) * max(times, 0))", "pass",
           "unit/text/test_template_sandbox.py::test_no_template_costs_more_than_its_budget[{{ 'a' * 10**9 }}]",
           r"assert \(?(len|False|\(?1000000000|\d+\.\d+ <)|< 0\.5|100 << 20|assert \d+ < 104857600"),
    Mutant("a template's mistake is our failure", "text/chat_template.py", "except jinja2.TemplateError as error:",
           "except jinja2.UndefinedError as error:", _PARSER.format("template"), r"jinja2\.exceptions\.Template"),
    Mutant("a broken message is our failure", "text/chat_template.py", "except Exception:  # whatever",
           "except OSError:  #", _PARSER.format("messages"), "UndefinedError|TypeError|TemplateRuntimeError"),
    Mutant("text may spell control tokens", "text/tokenizer.py", "return self._plain_encoder().encode(text)",
           "return self._backend.encode(text, add_special_tokens=False).ids", _PARSER.format("text"), "special_ids"),
    Mutant("nothing is held for a stop string", "text/detokenizer.py", "keep = len(text) - self._finder.held",
           "keep = len(text)", _PARSER.format("detokenizer"), "AssertionError"),
    Mutant("an event ends with one line end", "server/openai/chunks.py", 'self._end = b"]}\\n\\n"',
           'self._end = b"]}\\n"', _PARSER.format("events"), "the stream ends inside an event"),
    # bodies, and what they may ask for
    Mutant("half surrogates pass", "server/strict_json.py", "msgspec.json.decode(body)", "pass",
           _PARSER.format("json-body"), "surrogates not allowed"),
    Mutant("depth has no limit", "server/strict_json.py", "    _check_shape(body)\n", "", _WORDS.format("json-body"),
           "RecursionError|MAX_DEPTH"),
    Mutant("a text is tokenized before it is measured", "server/limits.py", "if num_bytes > limit:", "if False:",
           _REFUSE.format("T14 9 MB of spaces"), r"\d+ ms of CPU"),
    Mutant("answers multiply without limit", "server/limits.py", "if answers > MAX_ANSWERS:", "if False:",
           _REFUSE.format("T10 answers that multiply"), r"statuses\(received\)\[:1\] in"),
    Mutant("a route is admitted by nobody", "server/limits.py", '    "/detokenize": "admit_detokenize",\n', "",
           "http/test_doors.py::test_every_posting_route_is_in_the_table_of_limits", "/detokenize"),
    Mutant("a number's range is open above", "base/sampling_params.py",
           "if value is not None and not (low <= value <= high):", "if value is not None and not low <= value:",
           "http/test_bad_input.py::test_b032_t11_each_numeric_field_has_a_closed_range[temperature]",
           "assert 200 == 400|status_code == status"),
    Mutant("ids beyond the vocabulary reach the engine", "server/limits.py",
           "if ids and not (min(ids) >= 0 and max(ids) < figures.vocab_size):", "if False:",
           "http/test_bad_input.py::test_b030_ids_outside_the_vocabulary[logit_bias--1]", "status_code == status"),
    Mutant("what cannot be obeyed is ignored", "server/openai/protocol.py",
           "if extra.get(name) is not None:\n            raise", "if False:\n            raise",
           "http/test_bad_input.py::test_what_is_not_served_yet_is_said_and_never_ignored[guided_json-fields5]",
           "status_code == status"),
    Mutant("tensors in a request are passed over", "server/openai/protocol.py",
           '    "prompt_embeds": "prompts are text or token ids",\n', "",
           "http/test_bad_input.py::test_what_is_not_served_yet_is_said_and_never_ignored[prompt_embeds-fields10]",
           "status_code == status"),
    Mutant("parts that are no text are passed over", "server/openai/messages.py", '        if part.type != "text":\n',
           '        if part.type != "text":\n            continue\n        if False:\n',
           "http/test_bad_input.py::test_messages_are_named_by_their_place", "status_code == status"),
    # connections
    Mutant("doubtful requests pass", "server/connection.py", "if self._refusal is None and self._is_doubtful():",
           "if False:", "hostile/test_http_bytes.py::test_t18_a_request_has_one_host_and_it_is_ours",
           r"statuses\(received\)\[:1\] in"),
    Mutant("codings are not looked at", "server/connection.py", 'codings != [b"chunked"]', "False",
           _STRICT.format("gzip before chunked"), r"statuses\(received\) in"),
    Mutant("headers have no limit", "server/connection.py", "self._refuse(StatusError(431))\n\n    def on_headers",
           "pass\n\n    def on_headers", _ENDLESS.format("many headers"), "anon_bytes|cpu_s|took all"),
    Mutant("one header has no limit", "server/connection.py", "if self._silent_bytes > MAX_SILENT_BYTES:", "if False:",
           _ENDLESS.format("one header"), "anon_bytes|cpu_s|took all"),
    Mutant("a body may come in any number of pieces", "server/connection.py", "if self._num_pieces > MAX_PIECES:",
           "if False:", _ENDLESS.format("chunks of one byte"), "anon_bytes|cpu_s|took all"),
    Mutant("a refused body is read to its end", "server/connection.py",
           "if self._in_body and not self.transport.is_closing():", "if False:",
           _ENDLESS.format("a body that nobody may send"), "anon_bytes|cpu_s|took all"),
    Mutant("an address takes all connections", "server/gate.py",
           "if key is not None and self._open_of.get(key, 0) >= self._most_per_address:", "if False:",
           "http/test_connections.py::test_t16_one_address_cannot_take_all_connections", "429|assert"),
    Mutant("leaving early is a failure", "server/edge.py", "except ClientDisconnect:", "except ZeroDivisionError:",
           _STORM, "ClientDisconnect|level"),
    Mutant("a stopped reader keeps its connection", "server/connection.py",
           'cycle.scope["sayfa.hang_up"] = self.transport.abort', 'cycle.scope["sayfa.hang_up"] = None',
           "hostile/test_crowds.py::test_f09_readers_that_stop_reading", "held|until"),
    Mutant("books of leavers stay open", "server/edge.py", 'record.close("abort")', "pass",
           "hostile/test_crowds.py::test_f08_what_one_client_held_is_free_at_once[0]", "held|until"),
    # doors
    Mutant("another method of an open path needs no key", "server/auth.py", "if match is Match.FULL:",
           "if match is not Match.NONE:", "http/test_doors.py::test_t18_every_route_and_method_without_a_key",
           r"AssertionError: \('/health', 'POST'"),
    Mutant("a Host may end with ours", "server/edge.py", "if name not in self._hosts:",
           "if not name.startswith(tuple(self._hosts)):", "http/test_doors.py::test_t19_only_listed_hosts_are_served",
           r"localhost\.evil\.com"),
    Mutant("every origin is let in", "server/edge.py", 'and (origin in self._origins or b"*" in self._origins):', ":",
           "http/test_doors.py::test_b075_preflight_needs_no_key_and_only_listed_origins_get_headers",
           r"assert '?\*?'? ?=="),
    Mutant("strangers need no key", "server/serve.py", '    raise ConfigError(\n        f"--host {options.host} can be',
           '    ConfigError(\n        f"--host {options.host} can be',
           "http/test_serving.py::test_t19_strangers_need_a_key", "DID NOT RAISE"),
    Mutant("keys have no case", "server/auth.py", 'key.strip().encode("utf-8"', 'key.strip().lower().encode("utf-8"',
           "http/test_doors.py::test_any_of_several_keys_opens_and_nothing_else_does", "200 == 401"),
    Mutant("metrics stay open", "server/app.py", "OPEN_ROUTES if options.protect_metrics else OPEN_ROUTES | ",
           "OPEN_ROUTES | ", "http/test_doors.py::test_protect_metrics_closes_them", "200 == 401"),
    # what is told
    Mutant("prompts are logged", "server/body.py", "    report_unknown(parsed, request.url.path)\n",
           "    log.warning('%r', value)\n", _STORM, "canary-prompt"),
    Mutant("an error tells where the server lies", "server/errors.py",
           '"There is no such route here; /docs lists what there is."',
           'f"There is no such route in {__file__}."', _STORM, "leak is None"),
    Mutant("a mistake of ours is told in its words", "server/errors.py",
           'f"The server failed to answer this request. If you report it, name the request id {request_id}."',
           'f"{error} {request_id}"',
           "http/test_bad_input.py::test_t20_a_bug_of_ours_is_a_fixed_sentence_with_the_request_id", "deadbeef"),
    Mutant("keys are written to the log", "base/log.py",
           'return _SECRET.sub(lambda match: match[1] + "(hidden)", text)', "return text",
           "unit/base/test_log.py::test_what_looks_like_a_key_is_hidden", "'abcdef123456' (not in|is contained)"),
    Mutant("a line of the log may be two", "base/log.py", "return text if text.isprintable() else ", "return text or ",
           "unit/base/test_log.py::test_any_text_stays_one_line_in_both_forms[0]", "isprintable"),
    # one caller's data does not reach another
    Mutant("the salt is forgotten", "core/kv_cache.py", "request.adapter, request.salt)", 'request.adapter, "")',
           "hostile/test_tenants.py::test_f29_a_prompt_of_another_tenant_is_never_found_in_the_cache[0]",
           "tokens were cached"),
    Mutant("the tenant is left out of the salt", "server/context.py", "encode([tenant, caller_salt])",
           "encode([None, caller_salt])", "http/test_doors.py::test_tenants_never_share_pages_and_a_salt_only_divides",
           r"assert \d+ == 6"),
    Mutant("a border may move in a page's name", "base/page_hash.py",
           'return tag + len(value).to_bytes(8, "little") + value', "return value",
           "unit/base/test_page_hash.py::test_moving_a_border_between_two_parts_changes_the_root", "assert b'"),
    Mutant("a hash is believed", "core/page_pool.py", "if page and self._content[page] == content else 0",
           "if page else 0", "unit/core/test_kv_cache.py::test_a_forged_hash_finds_nothing", "assert"),
    Mutant("outputs go to a neighbour", "core/results.py", "        tokens.append(token)\n",
           "        result.tokens[0] = globals().setdefault('last', [token])[0]; globals()['last'] = [token]\n"
           "        tokens.append(token)\n",
           "hostile/test_tenants.py::test_f39_no_token_of_one_tenant_reaches_another[0]",
           "was given tokens of tenant"),
    Mutant("attention reads a token too many", "nn/program/reference.py", "end = int(batch.positions[token]) + 1",
           "end = min(int(batch.positions[token]) + 2, gathered.shape[1])",
           "hostile/test_tenants.py::test_t36_a_page_is_never_read_before_it_is_written[0]", "AssertionError"),
    # what is kept is bounded, and nothing else listens
    Mutant("each tenant is remembered for ever", "core/policy.py",
           "if tag > self._now and len(self._finish) <= MAX_TENANTS:", "if tag > self._now:",
           "unit/core/test_policy.py::test_many_tenants_cost_bounded_memory", "MAX_TENANTS|assert"),
    Mutant("each guilty request is remembered for ever", "wire/supervisor.py",
           "if len(self._refused_until) >= MAX_REMEMBERED:", "if False:",
           "unit/wire/test_supervisor.py::test_the_memory_of_deaths_is_bounded", "_refused_until"),
    Mutant("the engine listens", "engine/process.py", "class EngineLoop:\n",
           'DOOR = socket.create_server(("127.0.0.1", 0))\n\n\nclass EngineLoop:\n',
           "soak/test_pressure.py::test_t33_nothing_listens_but_the_port", "more listens than the port"),
)  # fmt: skip
