package bookmender;

import java.io.IOException;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.BookKeeperAdmin;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.client.api.OpenBuilder;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.meta.LedgerManager;
import org.apache.bookkeeper.net.BookieId;
import org.apache.bookkeeper.proto.BookieClient;
import org.apache.bookkeeper.stats.NullStatsLogger;

/** A Java client of one BookKeeper cluster, and the administrator's view of it. */
final class Cluster {
    private static final long LISTING_TIMEOUT_MS = 30_000;

    private final BookKeeper client;
    private final BookKeeperAdmin admin;

    private Cluster(BookKeeper client, ClientConfiguration settings) {
        this.client = client;
        this.admin = new BookKeeperAdmin(client, NullStatsLogger.INSTANCE, settings);
    }

    /**
     * Options: {@code v2} (wire protocol), {@code readTimeoutS}; for new ledgers {@code
     * metadataVersion} and {@code ctime} (whether to store it); for writers {@code
     * delayEnsembleChange} (a failed bookie stays in as long as enough others acknowledge).
     */
    static Cluster open(String metadataServiceUri, Options options) throws Exception {
        ClientConfiguration settings = new ClientConfiguration();
        settings.setMetadataServiceUri(metadataServiceUri);
        settings.setUseV2WireProtocol(options.flag("v2", false));
        settings.setStoreSystemtimeAsLedgerCreationTime(options.flag("ctime", false));
        settings.setProperty("ledgerMetadataVersion", (int) options.number("metadataVersion", 3));
        settings.setDelayEnsembleChange(options.flag("delayEnsembleChange", false));
        settings.setReadEntryTimeout((int) options.number("readTimeoutS", 5));
        settings.setNumIOThreads(2);
        settings.setNumWorkerThreads(2);
        settings.setThrottleValue(0); // reads a second of a handle: we bound what is in flight
        return new Cluster(BookKeeper.forConfig(settings).build(), settings);
    }

    BookKeeper client() {
        return client;
    }

    BookKeeperAdmin admin() {
        return admin;
    }

    LedgerManager ledgers() {
        return client.getLedgerManager();
    }

    BookieClient bookies() {
        return client.getClientCtx().getBookieClient();
    }

    /** Bookies that serve reads: the writable and the read-only ones. */
    Set<BookieId> presentBookies() throws BKException {
        Set<BookieId> present = new HashSet<>(admin.getAvailableBookies());
        present.addAll(admin.getReadOnlyBookies());
        return present;
    }

    /** Every ledger in the metadata. */
    List<Long> ledgerIds() throws IOException {
        List<Long> ids = new ArrayList<>();
        var ranges = ledgers().getLedgerRanges(LISTING_TIMEOUT_MS);
        while (ranges.hasNext()) {
            ids.addAll(ranges.next().getLedgers());
        }
        return ids;
    }

    /** As administrator: password and digest type come from the metadata. Fences nothing. */
    CompletableFuture<LedgerHandle> openWithoutRecovery(long ledgerId) {
        CompletableFuture<LedgerHandle> opened = new CompletableFuture<>();
        admin.asyncOpenLedgerNoRecovery(ledgerId, (rc, handle, ctx) -> settle(opened, rc, handle), null);
        return opened;
    }

    /** As administrator. Fences the ledger, recovers and closes it. */
    CompletableFuture<LedgerHandle> openWithRecovery(long ledgerId) {
        CompletableFuture<LedgerHandle> opened = new CompletableFuture<>();
        admin.asyncOpenLedger(ledgerId, (rc, handle, ctx) -> settle(opened, rc, handle), null);
        return opened;
    }

    /**
     * With recovery where it is open. The handle follows its metadata: a way to open ledgers that came
     * with 4.17.3, found by name because this is compiled against older ones too.
     */
    LedgerHandle openAndFollow(long ledgerId) throws Exception {
        LedgerMetadata metadata = ledgers().readLedgerMetadata(ledgerId).get().getValue();
        return (LedgerHandle)
                BookKeeper.class
                        .getMethod("openLedger", long.class, DigestType.class, byte[].class, boolean.class)
                        .invoke(
                                client,
                                ledgerId,
                                DigestType.fromApiDigestType(metadata.getDigestType()),
                                metadata.getPassword(),
                                true);
    }

    /** With recovery where it is open, as programs do. */
    OpenBuilder howToOpen(long ledgerId) throws Exception {
        LedgerMetadata metadata = ledgers().readLedgerMetadata(ledgerId).get().getValue();
        return client.newOpenLedgerOp()
                .withLedgerId(ledgerId)
                .withDigestType(metadata.getDigestType())
                .withPassword(metadata.getPassword())
                .withRecovery(true);
    }

    void close() {
        try {
            admin.close();
            client.close();
        } catch (BKException | InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    private static <T> void settle(CompletableFuture<T> future, int rc, T value) {
        if (rc == BKException.Code.OK) {
            future.complete(value);
        } else {
            future.completeExceptionally(BKException.create(rc));
        }
    }
}
