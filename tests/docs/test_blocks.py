"""Every code block of the documentation runs, and prints what the page shows."""

import pytest

pytest.importorskip("sybil")

from documentation_blocks import DOCS, PAGES, ROOT, needs_gpu, page_of

GPU_PAGES = [path for path in PAGES if any(map(needs_gpu, page_of(path).examples()))]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """Change to a folder that has the models, the examples and the data of the repository."""
    for name in ("graphkit", "tests", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_blocks_of_a_page_run(path):
    for example in page_of(path).examples():
        if not needs_gpu(example):
            example.evaluate()


@pytest.mark.gpu
@pytest.mark.parametrize("path", GPU_PAGES, ids=lambda path: path.stem)
def test_the_blocks_of_a_page_run_on_a_gpu(path):
    for example in page_of(path).examples():
        example.evaluate()


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
