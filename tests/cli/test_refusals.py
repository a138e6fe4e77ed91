"""Command lines that are refused: their exit code, and the words of their error.

In a command line, ``TINY`` is a module with small targets.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from graphkit.models.reference import ALGORITHMS, default_checkpoint
from graphkit.models.shapes import SHAPES

H200 = Path(__file__).parents[1] / "data" / "h200-capture.json"
TARGETS = ("capture", "inspect", "audit")
A_FOLDER = "is a folder. Load a model with --checkpoint"
NO_RECORD = "it is a folder. Name the file of a saved record."
REFUSED = [
    ("bench --shape llama-9b", f"unknown shape 'llama-9b': shapes are {', '.join(SHAPES)}, "),
    ("bench --draft head", "--draft applies to a --checkpoint"),
    ("bench --shape tiny --draft head", "--draft applies to a --checkpoint"),
    ("bench --shape tiny --algorithm STANDALONE", "STANDALONE needs a draft model of its kind"),
    ("bench --algorithm medusa", ", ".join(ALGORITHMS)),
    ("bench --topk 0", "SpecConfig.topk must be an int >= 1, got 0"),
    ("bench --num-draft-tokens 7", "SpecConfig.num_draft_tokens is 7"),
    ("bench --context 1025", "the target has contexts of at most 1024 tokens"),
    ("bench --context 1000", "--context is 1000, and the steps of a round need room for "),
    ("bench --checkpoint folder", "folder has no config.json"),
    ("bench --out missing/report.json", "cannot write missing/report.json"),
    ("generate --topk 0", "SpecConfig.topk must be an int >= 1, got 0"),
    ("generate --num-draft-tokens 7", "SpecConfig.num_draft_tokens is 7"),
    ("generate --num-steps -1 --num-draft-tokens 4", "SpecConfig.num_steps must be an int"),
    ("generate --algorithm multi_layer_eagle --num-steps 9", "num_steps is 9"),
    ("generate --algorithm medusa", "NONE, EAGLE, EAGLE3, MULTI_LAYER_EAGLE, STANDALONE"),
    ("generate --steps-per-launch 0", "SpeculativeEngine.steps_per_launch must be an int >= 1"),
    ("generate --max-new-tokens 0", "SamplingParams.max_new_tokens must be an int >= 1, got 0"),
    ("generate --temperature nan", "SamplingParams.temperature must be a finite number"),
    ("generate --temperature -1", "got -1.0"),
    (f"generate --prompt {'x' * 2000}", "a prompt has 2000 tokens, but prompt and output together"),
    (f"generate --algorithm EAGLE --checkpoint {default_checkpoint()}", "or use one of"),
    ("generate --draft nowhere", "--draft applies to a --checkpoint. Give one."),
    ("generate --dtype bfloat16", "--dtype applies to a --checkpoint. Give one."),
    ("generate --trust-remote-code", "--trust-remote-code applies to a --checkpoint"),
    ("generate --chat", "tokens are bytes has no chat template"),
    ("generate --max-context-len 1025", "the target has contexts of 1 to 1024 tokens"),
    ("generate --max-context-len 9", "BufferSizes.max_context_len is 9"),
    ("generate --page-size 0", "page_size must be an int >= 1, got 0"),
    ("generate --top-k -2", "SamplingParams.top_k"),
    ("generate --top-p 0", "SamplingParams.top_p"),
    ("generate --min-p nan", "SamplingParams.min_p"),
    ("generate --repetition-penalty 0", "SamplingParams.repetition_penalty"),
    ("generate --presence-penalty -3", "SamplingParams.presence_penalty"),
    ("generate --frequency-penalty nan", "SamplingParams.frequency_penalty"),
    ("generate --min-tokens 129", "SamplingParams.min_tokens is 129, but max_new_tokens is 128"),
    ("generate --stop ''", "a stop string is empty"),
    ("generate --prompts nowhere", "cannot read the prompts in nowhere: No such file"),
    ("generate --prompt - --prompt -", "stdin can be read once"),
    ("generate --algorithm NONE --checkpoint nowhere", "nowhere has no config.json"),
    ("capture no_such_module_here:x", "cannot be imported"),
    ("capture nonsense", "does not have the form package.module:attribute"),
    ("audit ''", "TARGET '' does not have the form package.module:attribute"),
    ("capture os:getcwd", "returned a str, not a graphkit.CaptureTarget"),
    ("capture TINY:absent", "has no attribute 'absent'"),
    ("capture TINY:right --mode verify", "unknown mode 'verify': modes are DECODE, TARGET_VERIFY"),
    ("capture TINY:right --mode idle", "unknown mode 'idle': modes are DECODE, TARGET_VERIFY"),
    ("capture TINY:right --mode draft", "no forward for DRAFT"),
    ("capture TINY:right --batch-sizes 0", "batch_sizes must hold ints >= 1, got 0"),
    ("capture TINY:right --batch-sizes -1", "got -1"),
    ("capture TINY:right --batch-sizes 1,1", "holds a size twice"),
    ("capture TINY:right --batch-sizes 1,99", "holds 99, but max_batch_size is 2"),
    ("capture --trust-remote-code", "--trust-remote-code applies to a --checkpoint"),
    ("capture models/", f"TARGET 'models/' {A_FOLDER}"),
    ("audit models/", f"TARGET 'models/' {A_FOLDER}"),
    *[
        (f"{command} {options}", words)
        for command in TARGETS
        for options, words in (
            ("a:b --checkpoint folder", "--checkpoint is given with the TARGET 'a:b'"),
            ("--topk 2", "--topk applies to a --checkpoint: a TARGET has its own settings."),
            ("a:b --max-context-len 9", "--max-context-len applies to a --checkpoint"),
            ("--checkpoint folder", "folder has no config.json"),
        )
    ],
    ("inspect record.json --batch-sizes 1,2", "--batch-sizes applies to a TARGET"),
    ("inspect record.json --mode decode --mode draft", "--mode was given 2 times"),
    ("inspect record.json --mode nonsense", "no mode 'nonsense'"),
    ("inspect record.json --batch-size 3", "no batch size 3"),
    ("inspect record.json --topk 2", "--topk applies to a --checkpoint"),
    ("inspect record.json --quantize fp8", "--quantize applies to a --checkpoint"),
    ("inspect nonsense", "cannot inspect 'nonsense': it is not a file. Name the file of a saved"),
    ("inspect bugs.py", "it is a Python file. Name a TARGET in it, such as bugs:target, as Python"),
    ("inspect folder/bugs.py", "Name a TARGET in it, such as folder.bugs:target, as"),
    ("inspect folder/", f"cannot inspect 'folder/': it {A_FOLDER}"),
    ("inspect TINY:right --mode no", "unknown mode 'no': modes are DECODE, TARGET_VERIFY"),
    ("inspect models.json", NO_RECORD),
    (f"diff models {H200}", NO_RECORD),
    ("export models --out a.html", NO_RECORD),
    (f"export {H200} --out models.json", "cannot write models.json: it is a folder."),
    *[
        (f"export record.json --out {name}", "formats are .json, .html, .svg, .trace.json.")
        for name in ("out.png", "out", "out.svg.gz", "out.html2", "out.trace")
    ],
    ("export record.json --out a.html --mode DRAFT", "no mode 'DRAFT' in this record: TARGET_VER"),
    ("export record.json --out a.html --batch-size 7", "no batch size 7 of any mode in this rec"),
    ("export empty.json --out out.html", "the record holds no nodes"),
    ("export empty.json --out out.trace.json", "the record holds no nodes"),
    ("audit TINY:right --only backed", "audits are warmup, frozen, forward, pointers"),
    *[
        (f"audit TINY:right --only pointers --tolerance {value}", "must be a number above 0")
        for value in ("0", "-1", "nan")
    ],
    ("audit TINY:right --check no.json", "not a record of graphkit"),
    ("audit a:b --check models", NO_RECORD),
    *[
        (f"audit a:b --lock lock.json {option}", f"{option.split()[0]} has no effect: --lock")
        for option in ("--only pads", "--out report.json", "--json")
    ],
]
UNPARSED = [
    ("", "error: "),
    ("nothing", "error: "),
    ("capture --nothing", "error: "),
    ("capture --device tpu", "error: "),
    ("capture --mode", "error: "),
    ("capture a:b c:d", "error: "),
    *[
        (f"capture TINY:right --batch-sizes {sizes}", "is not a list of sizes such as 1,2,4")
        for sizes in ("''", "x", "'1;2'", "1,,2", "1.5")
    ],
    ("export", "error: "),
    ("export record.json", "error: "),
    ("diff record.json", "error: "),
    *[
        (f"diff record.json record.json --fail-above={text}", "is not a percentage such as 5%")
        for text in ("x", "-1%", "nan", "inf%", "''")
    ],
    ("doctor now", "error: "),
    *[(f"audit TINY:right --only {names}", "names no audit") for names in ("''", ",", "' '")],
    ("bench --shape tiny --checkpoint folder", "not allowed with argument --shape"),
    ("bench --steps 0", "'0' is not a whole number of at least 1"),
    ("bench --rounds many", "'many' is not a whole number of at least 1"),
    (f"bench --context {'9' * 5000}", "is not a whole number of at least 1"),
    ("bench --batch-sizes 1,,2", "'' is not a whole number of at least 1; give a list such as"),
    ("bench --steps-per-launch 4,-1", "'-1' is not a whole number of at least 1; give a list"),
    ("bench --generations v2,v4", "'v4' is not one of v1, v2, v3"),
    ("bench --quantize fp8,fp4", "'fp4' is not one of none, fp8, int4; give a list such as none"),
    ("bench reference", "unrecognized arguments: reference"),
    *[
        (f"generate {options}", "error: ")
        for options in (
            "--topk x", "--seed -1", f"--seed {2**63}", "--seed 1.5", "--generation v4",
            "--device tpu", "--max-new-tokens 1.5", "text", "--max-context-len 0", "--dtype int8",
        )
    ],
]  # fmt: skip
WITHOUT_CUDA = ("bench --device cuda", "generate --device cuda", "capture TINY:right --device cuda")


@pytest.fixture
def refused(run, tiny, saved, here):
    """Return ``refused(line)``, which runs a command that must print and write nothing."""
    for name in ("folder", "models", "models.json"):
        (here / name).mkdir()
    for name in ("bugs.py", "folder/bugs.py"):
        (here / name).write_text("target = None\n")
    (here / "no.json").write_text("{}")
    (here / "empty.json").write_text(json.dumps(json.loads(saved.read_text()) | {"graphs": []}))
    files = {*here.rglob("*")}

    def command(line):
        words = shlex.split(line.replace("TINY", tiny))
        if words[:1] == ["generate"] and "--prompt" not in words:
            words += ["--prompt", "a"]
        ended = run(*words)
        assert ended.out == ""
        assert {*here.rglob("*")} - {here / "__pycache__"} == files
        return ended

    return command


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), REFUSED, ids=lambda text: text[:60])
def test_what_cannot_be_done_is_refused_on_one_line(refused, line, words):
    ended = refused(line)
    assert ended.code == 2
    assert words in ended.error


@pytest.mark.parametrize(("line", "words"), UNPARSED, ids=lambda text: text[:60])
def test_what_cannot_be_parsed_is_answered_with_the_usage(refused, line, words):
    ended = refused(line)
    assert ended.code == 2
    assert "usage: graphkit" in ended.err
    assert words in ended.err


@pytest.mark.parametrize("line", WITHOUT_CUDA)
def test_a_missing_device_has_an_exit_code_of_its_own(refused, line):
    ended = refused(line)
    assert ended.code == 3
    assert "no CUDA device for device='cuda'" in ended.error


def test_a_python_file_outside_of_the_folder_is_named_by_its_own_name(run, here, tmp_path_factory):
    file = tmp_path_factory.mktemp("elsewhere") / "bugs.py"
    file.write_text("target = None\n")
    assert "such as bugs:target, as Python imports it" in run("inspect", file).error
