package bookmender;

import io.netty.buffer.ByteBufAllocator;
import java.util.ArrayDeque;
import java.util.Comparator;
import java.util.Deque;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Phaser;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.DistributionSchedule.WriteSet;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.RoundRobinDistributionSchedule;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.net.BookieId;
import org.apache.bookkeeper.proto.checksum.DigestManager;

/**
 * Reads every copy of every entry from every bookie that the metadata names for it.
 *
 * <p>Nothing of bookmender is involved: the Java client lists the ledgers, parses their metadata,
 * says which bookie holds which entry, reads, and checks the digests. Writes and fences nothing.
 *
 * <p>A ledger that is not closed is judged up to the last add confirmed that an open without recovery
 * finds. A bookie that metadata names and that is not registered makes a ledger MISSING, also where it
 * holds none of the entries yet.
 */
final class Judge {
    private static final int OPEN_AHEAD = 64;

    private final Cluster cluster;
    private final Output output;
    private final Set<BookieId> present;
    private final CopyReader copies;
    private final Tally tally;
    private final Phaser unfinished = new Phaser(1);

    private Judge(Cluster cluster, Output output, Tally tally) throws BKException {
        this.cluster = cluster;
        this.output = output;
        this.tally = tally;
        this.present = cluster.presentBookies();
        this.copies = new CopyReader(cluster.bookies());
    }

    /**
     * Options: {@code ledgers}, ids (all when absent); {@code expect}, a list of {@code {ledger, last,
     * sha256}}, content that the Java client must read back.
     */
    static int run(Cluster cluster, Options options, Output output) throws Exception {
        boolean isAll = !options.has("ledgers");
        List<Long> ledgerIds = isAll ? cluster.ledgerIds() : options.numbers("ledgers");
        Tally tally = new Tally(output, ledgerIds.size());
        new Judge(cluster, output, tally).judge(ledgerIds, isAll);
        for (Options expected : options.objects("expect")) {
            tally.content(Reader.compare(cluster, expected, output));
        }
        return tally.summary().exit();
    }

    private record Opening(long ledgerId, CompletableFuture<LedgerHandle> handle) {}

    private void judge(List<Long> ledgerIds, boolean mayVanish) throws Exception {
        Deque<Opening> openings = new ArrayDeque<>();
        for (long ledgerId : ledgerIds) {
            openings.add(new Opening(ledgerId, cluster.openWithoutRecovery(ledgerId)));
            if (openings.size() == OPEN_AHEAD) {
                judge(openings.remove(), mayVanish);
            }
        }
        while (!openings.isEmpty()) {
            judge(openings.remove(), mayVanish);
        }
        unfinished.arriveAndAwaitAdvance();
    }

    private void judge(Opening opening, boolean mayVanish) throws Exception {
        LedgerHandle handle;
        try {
            handle = opening.handle.get();
        } catch (ExecutionException error) {
            if (!Errors.isNoSuchLedger(error)) {
                finish(new LedgerVerdict(opening.ledgerId, unopened(opening.ledgerId), Errors.name(error)));
            } else if (!mayVanish) {
                finish(LedgerVerdict.noSuchLedger(opening.ledgerId));
            } // else deleted since we listed it
            return;
        }
        readCopies(handle);
        handle.closeAsync(); // of a reader: only drops its watch on the metadata
    }

    /** Bookies gone that the metadata names, of a ledger that could not be opened; none if that fails too. */
    private Set<BookieId> unopened(long ledgerId) throws InterruptedException {
        try {
            return gone(cluster.ledgers().readLedgerMetadata(ledgerId).get().getValue());
        } catch (ExecutionException error) {
            return Set.of();
        }
    }

    private Set<BookieId> gone(LedgerMetadata metadata) {
        Set<BookieId> gone = new TreeSet<>(Comparator.comparing(BookieId::toString));
        metadata.getAllEnsembles().values().forEach(gone::addAll);
        gone.removeAll(present);
        return gone;
    }

    private void readCopies(LedgerHandle handle) throws Exception {
        LedgerMetadata metadata = handle.getLedgerMetadata();
        long lastEntryId = handle.getLastAddConfirmed();
        LedgerVerdict verdict = new LedgerVerdict(metadata, lastEntryId, gone(metadata));
        if (lastEntryId < 0) {
            finish(verdict);
            return;
        }
        DigestManager digest = digest(metadata);
        var schedule =
                new RoundRobinDistributionSchedule(
                        metadata.getWriteQuorumSize(), metadata.getAckQuorumSize(), metadata.getEnsembleSize());
        long entryBytes = metadata.getLength() / (lastEntryId + 1); // 0, a guess too, unless closed
        unfinished.register();
        for (long entryId = 0; entryId <= lastEntryId; entryId++) {
            List<BookieId> ensemble = metadata.getEnsembleAt(entryId);
            WriteSet indexes = schedule.getWriteSet(entryId);
            for (int at = 0; at < indexes.size(); at++) {
                readCopy(verdict, digest, ensemble.get(indexes.get(at)), entryId, entryBytes);
            }
            indexes.recycle();
        }
    }

    private void readCopy(
            LedgerVerdict verdict, DigestManager digest, BookieId bookie, long entryId, long entryBytes)
            throws InterruptedException {
        if (!present.contains(bookie)) {
            settle(verdict, entryId, bookie, CopyState.GONE);
            return;
        }
        copies.read(
                bookie,
                verdict.ledgerId(),
                entryId,
                entryBytes,
                (rc, entry) -> {
                    CopyState state;
                    try {
                        state =
                                rc == BKException.Code.OK
                                        ? verdict.compare(entryId, digest.verifyDigestAndReturnData(entryId, entry))
                                        : CopyState.of(rc);
                    } catch (BKException.BKDigestMatchException error) {
                        state = CopyState.CORRUPT;
                    } catch (RuntimeException | Error error) { // whatever it is, the copy was not seen to be good
                        state = CopyState.UNKNOWN;
                    }
                    settle(verdict, entryId, bookie, state);
                });
    }

    private void settle(LedgerVerdict verdict, long entryId, BookieId bookie, CopyState state) {
        tally.copy(state);
        if (verdict.settle(entryId, bookie, state)) {
            finish(verdict);
            unfinished.arriveAndDeregister();
        }
    }

    private void finish(LedgerVerdict verdict) {
        tally.ledger(verdict);
        output.line(verdict.fields());
    }

    private static DigestManager digest(LedgerMetadata metadata) throws Exception {
        // Metadata of version 1 stores neither; then Java's administrator takes its settings' defaults.
        DigestType type =
                metadata.hasPassword()
                        ? DigestType.fromApiDigestType(metadata.getDigestType())
                        : DigestType.CRC32;
        return DigestManager.instantiate(
                metadata.getLedgerId(),
                metadata.hasPassword() ? metadata.getPassword() : new byte[0],
                DigestType.toProtoDigestType(type),
                ByteBufAllocator.DEFAULT,
                false);
    }
}
