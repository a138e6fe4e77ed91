from graphkit.audit.kit.conformance import attention_conformance as attention_conformance
from graphkit.audit.kit.equivalence import (
    assert_replay_equivalent as assert_replay_equivalent,
    assert_target_equivalent as assert_target_equivalent,
)
from graphkit.audit.kit.strategies import batches as batches, target_batches as target_batches
from graphkit.models.wrapper.comparison import check_wrapper as check_wrapper
