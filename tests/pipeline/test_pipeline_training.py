"""The ranking model under TorchRec's train pipeline on two processes, against a plain loop on one."""

from typing import Any

import pytest
import torch
from pipeline_jobs import CONFIG, dataset, evaluate_plainly, plain_first_step, plain_losses
from torch import Tensor

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def plain() -> tuple[Tensor, Tensor]:
    """The plain loop's losses, and how far rounding may take others: twice as far as another order of its sums."""
    torch.set_num_threads(1)
    data = dataset()
    losses, others = (torch.tensor(plain_losses(data, CONFIG, parts), dtype=torch.float64) for parts in (1, 2))
    rounding = 8 * torch.finfo(torch.float32).eps * losses
    # Differences grow as training goes on, and not evenly.
    return losses, 2 * (losses - others).abs().cummax(0).values + rounding


def test_the_losses_are_those_of_a_plain_loop_on_the_same_global_batches(
    results: Results, plain: tuple[Tensor, Tensor]
) -> None:
    losses, tolerance = plain
    for rank in results:
        actual = torch.tensor(rank["losses"], dtype=torch.float64)
        assert actual.shape == losses.shape
        assert ((actual - losses).abs() <= tolerance).all(), ((actual - losses).abs() / tolerance).max()


def test_the_gradients_are_those_of_the_whole_global_batch(results: Results) -> None:
    """Neither AdamW nor Adagrad sees a factor in all gradients, so the losses do not show one."""
    for kind, wanted in zip(("gradients", "squares"), plain_first_step(dataset()), strict=True):
        for rank in results:
            assert rank[kind].keys() == wanted.keys()
            for name, expected in wanted.items():
                atol = 1e-5 * expected.abs().max().item()
                torch.testing.assert_close(rank[kind][name], expected, rtol=1e-4, atol=atol, msg=name)


def test_training_lowers_the_loss_on_all_ranks_alike(results: Results) -> None:
    for key in ("losses", "ne"):
        assert results[0][key] == results[1][key]
    # Without the last batch of each epoch, which has one request.
    first, second = torch.tensor(results[0]["losses"]).view(2, -1)[:, :-1]
    assert second.mean() < first.mean()


def test_a_checkpoint_is_the_plain_models_and_torchrecs_entropy_is_ours(results: Results) -> None:
    ne = evaluate_plainly(dataset(), results[0]["checkpoints"][0]["model"])
    assert ne == pytest.approx(results[0]["ne"][-1], rel=1e-5)


@pytest.mark.parametrize(("key", "module"), [("pipelined", "model.embedding"), ("stack: pipelined", "embed")])
def test_the_sharded_collection_is_pipelined(results: Results, key: str, module: str) -> None:
    for rank in results:
        assert rank[key] == [(module, "PipelinedForward")]


def test_attention_layers_in_a_module_list_beside_the_collection_train(results: Results) -> None:
    for name in ("stack: before", "stack: after"):
        for one, other in zip(results[0][name], results[1][name], strict=True):
            assert torch.equal(one, other)
    before, after = results[0]["stack: before"], results[0]["stack: after"]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_tables_and_their_optimiser_states_are_spread_over_the_ranks(results: Results) -> None:
    first, second = (set(rank["local tables"]) for rank in results)
    assert first
    assert second
    assert not first & second
    assert len(first | second) == 4


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_how_tables_are_cut_changes_nothing(results: Results, sharding: str) -> None:
    by_sharding = results[0]["losses by sharding"]
    # Column-wise, Adagrad averages over the columns of a shard: another optimiser, but the same first loss.
    count = 1 if sharding == "column_wise" else None
    torch.testing.assert_close(
        torch.tensor(by_sharding[sharding][:count]),
        torch.tensor(by_sharding["table_wise"][:count]),
        rtol=2e-6,
        atol=0,
    )


def test_ranks_without_events_or_requests_do_not_hang_the_others(results: Results) -> None:
    for rank in results:
        assert len(rank["empty: parts"]) == 4
        assert torch.isfinite(torch.tensor(rank["empty: parts"])).all()
    assert results[1]["empty: parts"][2] == 0.0
    for name, parameter in results[0]["empty: dense parameters"].items():
        assert torch.equal(parameter, results[1]["empty: dense parameters"][name]), name


def test_dense_parameters_stay_the_same_on_all_ranks(results: Results) -> None:
    for name, parameter in results[0]["dense parameters"].items():
        assert torch.equal(parameter, results[1]["dense parameters"][name]), name


def test_a_resumed_run_ends_like_an_uninterrupted_one(results: Results) -> None:
    for rank in results:
        assert rank["resumed losses"] == rank["losses"][len(rank["losses"]) // 2 :]
    whole, resumed = results[0]["checkpoints"]
    for part in ("model", "fused_optimizer"):
        assert whole[part].keys() == resumed[part].keys()
        for name, tensor in whole[part].items():
            assert torch.equal(tensor, resumed[part][name]), name


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_all_ranks(results: Results) -> None:
    for rank in results:
        assert "a file" in rank["failed save"]
