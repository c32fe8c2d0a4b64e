package bookmender;

import io.netty.buffer.ByteBuf;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.net.BookieId;
import org.apache.bookkeeper.proto.BookieClient;
import org.apache.bookkeeper.proto.BookieProtocol;

/**
 * Reads single copies from named bookies, with a bounded window for each bookie.
 *
 * <p>A bookie is asked for at most {@link #WINDOW} copies at once, and for fewer if they are large: a
 * copy takes one permit for each 16 KiB, so that about 4 MiB are under way. (Thousands of reads in
 * flight can wedge a 4.18.0 bookie for good.) One that has only let us wait is not asked any more.
 */
final class CopyReader {
    /** Called once, on any thread. The entry is valid until the call returns; null on error. */
    interface Receiver {
        void received(int rc, ByteBuf entry);
    }

    private static final int WINDOW = 256;
    private static final int PERMIT_BYTES = 16 * 1024;
    private static final int PERMITS_MAX = 64;
    private static final int ATTEMPTS_MAX = 2;
    private static final int TIMEOUTS_MAX = 8;

    /** How one bookie is treated. */
    private static final class Manners {
        final Semaphore window = new Semaphore(WINDOW);
        final AtomicInteger timeoutsInARow = new AtomicInteger();
    }

    private final BookieClient bookies;
    private final Map<BookieId, Manners> manners = new ConcurrentHashMap<>();

    CopyReader(BookieClient bookies) {
        this.bookies = bookies;
    }

    /** Blocks while the bookie's window is full. {@code entryBytes}: a guess at the entry's size. */
    void read(BookieId bookie, long ledgerId, long entryId, long entryBytes, Receiver receiver)
            throws InterruptedException {
        Manners of = manners.computeIfAbsent(bookie, each -> new Manners());
        int permits = (int) Math.max(1, Math.min(PERMITS_MAX, entryBytes / PERMIT_BYTES));
        of.window.acquire(permits);
        if (of.timeoutsInARow.get() >= TIMEOUTS_MAX) {
            of.window.release(permits);
            receiver.received(BKException.Code.TimeoutException, null);
            return;
        }
        attempt(
                bookie,
                ledgerId,
                entryId,
                ATTEMPTS_MAX,
                (rc, entry) -> {
                    if (rc == BKException.Code.TimeoutException) {
                        of.timeoutsInARow.incrementAndGet();
                    } else {
                        of.timeoutsInARow.set(0);
                    }
                    of.window.release(permits);
                    receiver.received(rc, entry);
                });
    }

    private void attempt(BookieId bookie, long ledgerId, long entryId, int attempts, Receiver receiver) {
        bookies.readEntry(
                bookie,
                ledgerId,
                entryId,
                (rc, ledger, id, entry, context) -> {
                    if (isFinal(rc) || attempts == 1) {
                        receiver.received(rc, entry);
                    } else {
                        attempt(bookie, ledgerId, entryId, attempts - 1, receiver);
                    }
                },
                null,
                BookieProtocol.FLAG_NONE);
    }

    private static boolean isFinal(int rc) {
        return rc == BKException.Code.OK || CopyState.of(rc) == CopyState.ABSENT;
    }
}
