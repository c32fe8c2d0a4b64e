"""The recheck of a worker session's copies, put together as the daemon does, in memory."""

import random

from auditor.checks.copies import CopyInspector
from auditor.checks.records import FindingReporter
from auditor.mark_reasons import Findings
from auditor.recheck import CopyRecheck
from tests.replication.cluster import DIGEST, Cluster
from tests.replication.nodes import PATHS, Node


def recheck_of(node: Node, cluster: Cluster, *, after_s: float) -> CopyRecheck:
    """Return a recheck that does not run yet. The node's recorder reports copies to it."""
    recheck = CopyRecheck(
        store=node.store,
        batcher=node.batcher,
        paths=PATHS,
        queue=node.queue,
        views=node.views,
        inspector=CopyInspector(
            manager=node.manager,
            bookies=cluster.bookies,
            views=node.views,
            clock=cluster.clock,
            rng=random.Random(0),
            fallback_digest=DIGEST,
        ),
        reports=FindingReporter(Findings(node.store, node.batcher, PATHS, cluster.clock)),
        after_s=after_s,
        clock=cluster.clock,
    )
    node.recorder.on_ended = recheck.expect
    return recheck
