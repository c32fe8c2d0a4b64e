"""A worker session's recheck of its copies, put together as the daemon does, on a cluster in
memory."""

import random

from auditor.checks.base import Reports
from auditor.checks.copies import CopyReader
from auditor.findings import Findings
from auditor.marker import BothQueues
from auditor.recheck import CopyRecheck
from tests.replication.cluster import DIGEST, Cluster
from tests.replication.nodes import PATHS, Node


def recheck_of(node: Node, cluster: Cluster, *, after_s: float) -> CopyRecheck:
    """Not running yet; the node's recorder tells it of copies."""
    recheck = CopyRecheck(
        store=node.store,
        batcher=node.batcher,
        paths=PATHS,
        queue=node.queue,
        views=node.views,
        reader=CopyReader(
            manager=node.manager,
            bookies=cluster.bookies,
            views=node.views,
            clock=cluster.clock,
            rng=random.Random(0),
            fallback_digest=DIGEST,
        ),
        reports=Reports(
            BothQueues(node.store, node.batcher, PATHS, cluster.clock),
            Findings(node.store, node.batcher, PATHS, cluster.clock),
        ),
        after_s=after_s,
        clock=cluster.clock,
    )
    node.recorder.on_ended = recheck.expect
    return recheck
