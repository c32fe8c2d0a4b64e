"""A Spark driver that takes a batch of the change feed and never ends, for tests that kill it.

``python -m tests.feed_stream_driver URI CLIENT LOCATION OUT``. It writes the rows of the batch to
OUT, and does not return to Spark, so the batch is not committed.
"""

import json
import os
import sys
import time

from pyspark.sql import DataFrame

from checkpoints.spark import register
from tests.spark_cluster import spark_session

END_S = 600


def main(uri: str, client: str, location: str, out: str) -> None:
    def note(batch: DataFrame, number: int) -> None:
        rows = [row.asDict() for row in batch.drop("fingerprint").collect()]
        with open(f"{out}.part", "w") as file:
            json.dump({"batch": number, "rows": rows}, file)
        os.replace(f"{out}.part", out)
        time.sleep(END_S)

    with spark_session() as spark:
        register(spark)
        query = (
            spark.readStream.format("bookkeeper-changes")
            .options(metadataServiceUri=uri, client=client)
            .load()
            .writeStream.foreachBatch(note)
            .option("checkpointLocation", location)
            .start()
        )
        query.awaitTermination(END_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
