"""What every test relies on."""

from collections.abc import Iterator

import pytest
import torch

# Files go to test processes whole, since their tests share compiled models; the longest go first,
# so that all processes end at about the same time.
LONGEST = (
    "test_recognise.py",
    "test_kernel_rows.py",
    "test_llama.py",
    "test_docs.py",
    "test_rewrite.py",
    "test_backend.py",
    "test_html.py",
    "test_fsdp.py",
    "test_sharded.py",
    "test_residual.py",
    "test_cli_config.py",
    "test_casts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def clean_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each test compiles afresh (no frames, recompile counts, caches), in a wide terminal."""
    with pytest.MonkeyPatch.context() as patch:
        # As wide as the documents show commands; importing readline, as pytest does, exports 80.
        patch.setenv("COLUMNS", "100")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
        patch.delenv("MXNORM_DISABLE", raising=False)
        torch._dynamo.reset()
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            yield
