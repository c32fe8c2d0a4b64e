package bookmender;

import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.LedgerHandle;

/** Creates, writes, closes and deletes ledgers at random, as an application does all day. */
final class Changer {
    private static final int OPEN_MAX = 3;
    private static final int ENTRIES_MAX = 5;

    private final Cluster cluster;
    private final Options options;
    private final Output output;
    private final Random random;

    // In the order of their creation. A ledger whose fate is unknown after an error is in no list.
    private final List<LedgerHandle> open = new ArrayList<>();
    private final List<Long> closed = new ArrayList<>();

    private Changer(Cluster cluster, Options options, Output output, long seed) {
        this.cluster = cluster;
        this.options = options;
        this.output = output;
        this.random = new Random(seed);
    }

    /**
     * Goes on until stdin ends, then closes what is open. Options: the {@link Shape} of all ledgers;
     * {@code threads} (default 3); {@code pauseMs}, the mean pause of a thread between two steps;
     * {@code keep}, the ledgers of a thread from which on it deletes some; {@code seed}.
     */
    static int run(Cluster cluster, Options options, Output output) throws Exception {
        AtomicBoolean hasStdinEnded = Writer.watchStdin();
        int count = (int) options.number("threads", 3);
        ExecutorService threads = Executors.newFixedThreadPool(count);
        try {
            List<Future<?>> running = new ArrayList<>();
            for (int number = 0; number < count; number++) {
                Changer changer = new Changer(cluster, options, output, options.number("seed", 0) + number);
                running.add(threads.submit(() -> {
                    changer.run(hasStdinEnded);
                    return null;
                }));
            }
            for (Future<?> each : running) {
                each.get();
            }
        } finally {
            threads.shutdownNow();
        }
        return Main.WELL;
    }

    private void run(AtomicBoolean hasStdinEnded) throws Exception {
        long pauseMs = options.number("pauseMs", 100);
        while (!hasStdinEnded.get()) {
            Thread.sleep(random.nextLong(2 * pauseMs + 1));
            step();
        }
        while (!open.isEmpty()) {
            close(open.remove(0));
        }
    }

    private void step() throws Exception {
        int drawn = random.nextInt(4);
        if (open.isEmpty() || (drawn == 0 && open.size() < OPEN_MAX)) {
            create();
        } else if (drawn == 1) {
            write(random.nextInt(open.size()));
        } else if (drawn == 2 && closed.size() >= options.number("keep", 50)) {
            delete(closed.remove(random.nextInt(closed.size())));
        } else {
            close(open.remove(random.nextInt(open.size())));
        }
    }

    private void create() throws InterruptedException {
        try {
            LedgerHandle ledger = new Shape(options).create(cluster);
            open.add(ledger);
            output.line("kind", "created", "ledger", ledger.getId());
            write(open.size() - 1);
        } catch (InterruptedException error) {
            throw error;
        } catch (Exception error) {
            fail("create", null, error);
        }
    }

    private void write(int index) throws InterruptedException {
        LedgerHandle ledger = open.get(index);
        var payloads = new Shape(options).payloads(ledger.getId()).iterator();
        try {
            for (int left = 1 + random.nextInt(ENTRIES_MAX); left > 0; left--) {
                ledger.addEntry(payloads.next());
            }
        } catch (BKException error) { // fenced by a repair, for example
            open.remove(index);
            fail("write", ledger.getId(), error);
        }
    }

    private void close(LedgerHandle ledger) throws InterruptedException {
        try {
            ledger.close();
            closed.add(ledger.getId());
            output.line("kind", "closed", "ledger", ledger.getId());
        } catch (BKException error) {
            fail("close", ledger.getId(), error);
        }
    }

    private void delete(long ledgerId) throws InterruptedException {
        try {
            cluster.client().deleteLedger(ledgerId);
            output.line("kind", "deleted", "ledger", ledgerId);
        } catch (BKException error) {
            fail("delete", ledgerId, error);
        }
    }

    private void fail(String step, Long ledgerId, Exception error) {
        output.line("kind", "failed", "step", step, "ledger", ledgerId, "error", Errors.name(error));
    }
}
