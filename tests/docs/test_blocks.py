"""Every code block of the documentation runs, and prints what the page shows."""

import pytest

pytest.importorskip("sybil")

import graphkit as gk
from documentation_blocks import (
    COMMANDS,
    DOCS,
    PAGES,
    README,
    ROOT,
    needs_gpu,
    page_of,
    printed,
    readme_commands,
)

READ = [README, *PAGES]
RUN_COMMANDS = [words for words in readme_commands() if words[0] == "graphkit"]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """Change to a folder that has the models, the examples and the data of the repository."""
    for name in ("graphkit", "tests", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_the_blocks_of_a_page_run(path):
    for example in page_of(path).examples():
        if not needs_gpu(example):
            example.evaluate()


@pytest.mark.gpu
@pytest.mark.parametrize("path", READ, ids=lambda path: path.stem)
def test_the_blocks_of_a_page_run_on_a_gpu(path):
    for example in page_of(path).examples():
        example.evaluate()


@pytest.mark.gpu
def test_the_first_example_runs_with_its_model_on_the_gpu():
    source = next(iter(page_of(README).examples())).parsed
    on_gpu = source.replace('device="cpu"', 'device="cuda"')
    assert on_gpu != source
    with pytest.raises(gk.ConfigError, match="the weights of the forward are on cpu, the runner"):
        exec(on_gpu, {})
    with printed() as output:
        exec(on_gpu.replace("\n\nfast", '\nmodel = model.to("cuda")\nfast', 1), {})
    assert output.getvalue() == "torch.Size([5, 10]) {8: 1}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [words for words in RUN_COMMANDS if words[1] != "bench"],  # takes minutes on a CPU
    ids=lambda words: words[1],
)
def test_a_command_of_the_readme_runs(words):
    run_command(words)


@pytest.mark.gpu
@pytest.mark.parametrize("words", RUN_COMMANDS, ids=lambda words: words[1])
def test_a_command_of_the_readme_runs_on_a_gpu(words):
    run_command(words)


def run_command(words):
    with printed() as output:
        assert COMMANDS[words[0]](words[1:]) == 0, (words, output.getvalue())


def test_the_readme_lists_commands():
    assert {words[1] for words in RUN_COMMANDS} >= {
        "generate",
        "capture",
        "audit",
        "bench",
        "record",
    }


def test_every_block_has_a_language_that_is_run_or_shown():
    """Blocks of other languages are output, tables and figures."""
    allowed = {
        "python",
        "console",
        "text",
        "{toctree}",
        "{raw}",
        "{include}",
        "{measures}",
        "{results}",
    }
    for path in [*PAGES, DOCS / "reference" / "index.md"]:
        fences = [line[3:] for line in path.read_text().splitlines() if line.startswith("```")]
        assert {fence.split()[0] for fence in fences[::2]} <= allowed, path.stem
