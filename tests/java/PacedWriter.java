package bookmender;

import io.netty.buffer.Unpooled;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.locks.LockSupport;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.net.BookieId;

/**
 * Adds to one ledger on a fixed schedule, however long the adds before take, and measures each add from
 * the moment it was due: a stall counts for all that were due meanwhile.
 */
final class PacedWriter {
    private static final int REPORT_EVERY = 50;

    private final Output output;
    private final long startNs;
    private final long intervalNs;

    // Guarded by this.
    private final List<Long> latenciesUs = new ArrayList<>();
    private long reported;
    private Throwable error;

    private PacedWriter(Output output, long startNs, long intervalNs) {
        this.output = output;
        this.startNs = startNs;
        this.intervalNs = intervalNs;
    }

    /**
     * Options: a {@link Shape}; {@code perS}, adds a second; {@code avoid}, a bookie that shall hold none
     * of them. Goes on until stdin ends or an add fails. Times are those of {@code System.nanoTime}.
     */
    static int run(Cluster cluster, Options options, Output output) throws Exception {
        Shape shape = new Shape(options);
        LedgerHandle ledger = createWithout(options.text("avoid", ""), shape, cluster);
        long intervalNs = TimeUnit.SECONDS.toNanos(1) / options.number("perS", 500);
        PacedWriter writer = new PacedWriter(output, System.nanoTime() + intervalNs, intervalNs);
        output.line(
                "kind", "pacing",
                "ledger", ledger.getId(),
                "startNs", writer.startNs,
                "intervalNs", intervalNs);
        Iterator<byte[]> payloads = shape.payloads(0).iterator();
        AtomicBoolean hasStdinEnded = Writer.watchStdin();
        for (long number = 0; writer.error() == null && !hasStdinEnded.get(); number++) {
            writer.add(ledger, number, payloads.next());
        }
        if (writer.error() == null) {
            ledger.close(); // after all that is under way
            return Main.WELL;
        }
        output.line("kind", "error", "error", Errors.name(writer.error()));
        return Main.COULD_NOT_TELL;
    }

    /** Placement is random: so try until it happens to leave that bookie out. */
    private static LedgerHandle createWithout(String bookie, Shape shape, Cluster cluster) throws Exception {
        while (true) {
            LedgerHandle ledger = shape.create(cluster);
            var ensemble = ledger.getLedgerMetadata().getEnsembleAt(0);
            if (bookie.isEmpty() || !ensemble.contains(BookieId.parse(bookie))) {
                return ledger;
            }
            ledger.close();
            cluster.client().deleteLedger(ledger.getId());
        }
    }

    private void add(LedgerHandle ledger, long number, byte[] payload) {
        long dueNs = startNs + number * intervalNs;
        for (long left = dueNs - System.nanoTime(); left > 0; left = dueNs - System.nanoTime()) {
            LockSupport.parkNanos(left);
        }
        ledger.appendAsync(Unpooled.wrappedBuffer(payload))
                .whenComplete((entryId, failure) -> settle(System.nanoTime() - dueNs, failure));
    }

    /** Called in the order of entries. */
    private synchronized void settle(long latencyNs, Throwable failure) {
        if (failure != null) {
            error = failure;
            return;
        }
        latenciesUs.add(TimeUnit.NANOSECONDS.toMicros(latencyNs));
        if (latenciesUs.size() == REPORT_EVERY) {
            output.line("kind", "paced", "first", reported, "latenciesUs", List.copyOf(latenciesUs));
            reported += latenciesUs.size();
            latenciesUs.clear();
        }
    }

    private synchronized Throwable error() {
        return error;
    }
}
