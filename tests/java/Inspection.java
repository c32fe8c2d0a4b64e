package bookmender;

import java.io.IOException;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.meta.LedgerMetadataSerDe;
import org.apache.bookkeeper.meta.LedgerUnderreplicationManager;
import org.apache.bookkeeper.net.BookieId;
import org.apache.zookeeper.KeeperException;

/** What Java's own classes make of the znodes that Java and bookmender share. */
final class Inspection {
    private Inspection() {}

    /** Prints the ids of all ledgers in the metadata. */
    static int list(Cluster cluster, Options options, Output output) throws Exception {
        output.line("kind", "listed", "ledgers", cluster.ledgerIds());
        return Main.WELL;
    }

    /** Option {@code ledgers}: ids. Prints what Java parsed, and the bytes that it would write for it. */
    static int metadata(Cluster cluster, Options options, Output output) throws Exception {
        for (long ledgerId : options.numbers("ledgers")) {
            LedgerMetadata metadata = cluster.ledgers().readLedgerMetadata(ledgerId).get().getValue();
            output.line(described(ledgerId, metadata, serialized(metadata)));
        }
        return Main.WELL;
    }

    /** A record of the kind {@code metadata}. */
    static Object[] described(long ledgerId, LedgerMetadata metadata, String serialized) {
        Map<String, List<String>> ensembles = new LinkedHashMap<>();
        metadata.getAllEnsembles()
                .forEach((first, bookies) -> ensembles.put(String.valueOf(first), names(bookies)));
        Map<String, String> custom = new LinkedHashMap<>();
        metadata.getCustomMetadata().forEach((key, value) -> custom.put(key, hex(value)));
        return new Object[] {
            "kind", "metadata",
            "ledger", ledgerId,
            "metadataVersion", metadata.getMetadataFormatVersion(),
            "ensembleSize", metadata.getEnsembleSize(),
            "writeQuorum", metadata.getWriteQuorumSize(),
            "ackQuorum", metadata.getAckQuorumSize(),
            "state", metadata.getState().toString(),
            "length", metadata.getLength(),
            "last", metadata.getLastEntryId(),
            "digest", metadata.hasPassword() ? metadata.getDigestType().toString() : null,
            "password", metadata.hasPassword() ? hex(metadata.getPassword()) : null,
            "ctime", metadata.getCtime(),
            "custom", custom,
            "ensembles", ensembles,
            "serialized", serialized
        };
    }

    /** The bytes that Java would write. */
    static String serialized(LedgerMetadata metadata) throws IOException {
        return hex(new LedgerMetadataSerDe().serialize(metadata));
    }

    /** One line for each mark. Creates the tree of marks where there is none, as every Java tool does. */
    static int underReplicated(Cluster cluster, Options options, Output output) throws Exception {
        LedgerUnderreplicationManager queue =
                cluster.client().getLedgerManagerFactory().newLedgerUnderreplicationManager();
        queue.listLedgersToRereplicate(null)
                .forEachRemaining(
                        mark -> output.line(
                                "kind", "mark",
                                "ledger", mark.getLedgerId(),
                                "replicas", mark.getReplicaList(),
                                "ctime", mark.getCtime(),
                                "lockedBy", holder(queue, mark.getLedgerId())));
        output.line("kind", "queue", "enabled", queue.isLedgerReplicationEnabled());
        queue.close();
        return Main.WELL;
    }

    /** None also where there never was an election. */
    static int auditor(Cluster cluster, Options options, Output output) throws Exception {
        BookieId auditor;
        try {
            auditor = cluster.admin().getCurrentAuditor();
        } catch (IOException error) {
            if (!(error.getCause() instanceof KeeperException.NoNodeException)) {
                throw error;
            }
            auditor = null;
        }
        output.line("kind", "auditor", "auditor", auditor == null ? null : auditor.toString());
        return Main.WELL;
    }

    private static String holder(LedgerUnderreplicationManager queue, long ledgerId) {
        try {
            return queue.getReplicationWorkerIdRereplicatingLedger(ledgerId);
        } catch (Exception error) {
            return null;
        }
    }

    private static List<String> names(List<BookieId> bookies) {
        return bookies.stream().map(BookieId::toString).toList();
    }

    private static String hex(byte[] bytes) {
        return HexFormat.of().formatHex(bytes);
    }
}
