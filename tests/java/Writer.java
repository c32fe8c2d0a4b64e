package bookmender;

import io.netty.buffer.Unpooled;
import java.io.IOException;
import java.io.OutputStream;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.bookkeeper.client.LedgerHandle;

/** Writes one ledger through the Java client, with a bounded number of entries under way. */
final class Writer {
    private static final int LEDGERS_AT_ONCE = 8;

    /** Told of each acknowledged entry, in order. */
    private interface Listener {
        void added(long entryId);
    }

    private final LedgerHandle ledger;
    private final int windowEntries;
    private final Semaphore window;
    private final Listener listener;

    // Guarded by this.
    private final MessageDigest sha256 = MessageDigest.getInstance("SHA-256");
    private long lastEntryId = -1;
    private Throwable error;

    private Writer(LedgerHandle ledger, int windowEntries, Listener listener) throws Exception {
        this.ledger = ledger;
        this.windowEntries = windowEntries;
        this.window = new Semaphore(windowEntries);
        this.listener = listener;
    }

    /**
     * Options: {@code shapes}, see {@link Shape}, each with {@code entries}, a {@code count} of ledgers
     * (default 1) and {@code close} (default true). Its output is what {@code judge} takes as expected.
     */
    static int write(Cluster cluster, Options options, Output output) throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(LEDGERS_AT_ONCE);
        try {
            List<Future<?>> writes = new ArrayList<>();
            for (Options shape : options.objects("shapes")) {
                for (long number = 0; number < shape.number("count", 1); number++) {
                    long ledgerNumber = number;
                    writes.add(threads.submit(() -> {
                        write(cluster, shape, ledgerNumber, output);
                        return null;
                    }));
                }
            }
            for (Future<?> each : writes) {
                each.get();
            }
        } finally {
            threads.shutdownNow();
        }
        return Main.WELL;
    }

    private static void write(Cluster cluster, Options options, long number, Output output)
            throws Exception {
        Shape shape = new Shape(options);
        LedgerHandle ledger = shape.create(cluster);
        Writer writer = new Writer(ledger, 64, entryId -> {});
        Iterator<byte[]> payloads = shape.payloads(number).iterator();
        for (long left = options.number("entries", 0); left > 0; left--) {
            writer.add(payloads.next());
        }
        writer.awaitAdded();
        if (writer.error() != null) {
            throw new IOException("cannot write ledger " + ledger.getId() + ": " + writer.error(), writer.error());
        }
        if (options.flag("close", true)) {
            ledger.close();
        }
        writer.print(output, "written");
    }

    /**
     * Adds to one ledger of the {@link Shape} given by the options until it is fenced or killed, or
     * until stdin ends; prints each acknowledged entry. Options: {@code window} (entries under way,
     * default 1), {@code pauseMs} between entries (default 0), {@code close} at the end of stdin.
     */
    static int writeForever(Cluster cluster, Options options, Output output) throws Exception {
        Shape shape = new Shape(options);
        LedgerHandle ledger = shape.create(cluster);
        output.line("kind", "created", "ledger", ledger.getId());
        Writer writer =
                new Writer(
                        ledger,
                        (int) options.number("window", 1),
                        entryId -> output.line("kind", "added", "ledger", ledger.getId(), "entry", entryId));
        Iterator<byte[]> payloads = shape.payloads(0).iterator();
        AtomicBoolean hasStdinEnded = watchStdin();
        while (writer.error() == null && !hasStdinEnded.get()) {
            writer.add(payloads.next());
            Thread.sleep(options.number("pauseMs", 0));
        }
        writer.awaitAdded();
        if (writer.error() == null && options.flag("close", true)) {
            ledger.close();
        }
        writer.print(output, "stopped");
        return writer.error() == null ? Main.WELL : Main.FOUND;
    }

    /** Option {@code ledgers}: ids. Prints each that was deleted. */
    static int delete(Cluster cluster, Options options, Output output) throws Exception {
        for (long ledgerId : options.numbers("ledgers")) {
            cluster.client().deleteLedger(ledgerId);
            output.line("kind", "deleted", "ledger", ledgerId);
        }
        return Main.WELL;
    }

    /** Becomes true at the end of stdin; what comes in before is dropped. */
    static AtomicBoolean watchStdin() {
        AtomicBoolean hasEnded = new AtomicBoolean();
        Thread watch =
                new Thread(() -> {
                    try {
                        System.in.transferTo(OutputStream.nullOutputStream());
                    } catch (IOException error) { // closed, then
                    }
                    hasEnded.set(true);
                });
        watch.setDaemon(true);
        watch.start();
        return hasEnded;
    }

    /** Blocks while the window is full. */
    private void add(byte[] payload) throws InterruptedException {
        window.acquire();
        ledger.appendAsync(Unpooled.wrappedBuffer(payload))
                .whenComplete((entryId, failure) -> {
                    settle(entryId, payload, failure);
                    window.release();
                });
    }

    private synchronized void settle(Long entryId, byte[] payload, Throwable failure) {
        if (failure == null) {
            lastEntryId = entryId;
            sha256.update(payload);
            listener.added(entryId);
        } else if (error == null) {
            error = failure;
        }
    }

    private void awaitAdded() throws InterruptedException {
        window.acquire(windowEntries);
    }

    /** The first one, null so far. */
    private synchronized Throwable error() {
        return error;
    }

    private synchronized void print(Output output, String kind) {
        output.line(
                "kind", kind,
                "ledger", ledger.getId(),
                "last", lastEntryId, // a fenced handle's last add confirmed is the recoverer's
                "sha256", HexFormat.of().formatHex(sha256.digest()),
                "error", error == null ? null : Errors.name(error));
    }
}
