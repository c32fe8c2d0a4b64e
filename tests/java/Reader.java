package bookmender;

import java.net.http.HttpClient;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.ReadHandle;

/** Reads ledgers as any reader does, through a handle. */
final class Reader {
    private static LedgerNotifications notifications;

    private Reader() {}

    /**
     * Options: {@code ledgers}, ids; {@code recover} (default false): open with recovery; {@code last}:
     * read up to this entry, rather than to the last add confirmed.
     */
    static int run(Cluster cluster, Options options, Output output) throws Exception {
        int exit = Main.WELL;
        for (long ledgerId : options.numbers("ledgers")) {
            try {
                read(cluster, ledgerId, options, output);
            } catch (Exception error) {
                output.line("kind", "content", "ledger", ledgerId, "error", Errors.name(error));
                exit = Main.COULD_NOT_TELL;
            }
        }
        return exit;
    }

    private static void read(Cluster cluster, long ledgerId, Options options, Output output)
            throws Exception {
        boolean withRecovery = options.flag("recover", false);
        LedgerHandle handle =
                (withRecovery ? cluster.openWithRecovery(ledgerId) : cluster.openWithoutRecovery(ledgerId))
                        .get();
        print(handle, Content.read(handle, options.number("last", handle.getLastAddConfirmed())), output);
        handle.close();
    }

    /**
     * Opens {@code ledgers} with recovery, and reads each of them through the same handle for every line
     * that comes in on stdin, until stdin ends. {@code handles}: {@code following} (the default) their
     * metadata; {@code plain}; or {@code notified} by the server {@code notifyServer}.
     */
    static int follow(Cluster cluster, Options options, Output output) throws Exception {
        Map<Long, ReadHandle> handles = new LinkedHashMap<>();
        for (long ledgerId : options.numbers("ledgers")) {
            handles.put(ledgerId, open(cluster, ledgerId, options));
            output.line("kind", "followed", "ledger", ledgerId);
        }
        for (int character = System.in.read(); character != -1; character = System.in.read()) {
            if (character == '\n') {
                handles.forEach((ledgerId, handle) -> readAgain(ledgerId, handle, output));
            }
        }
        return Main.WELL;
    }

    private static ReadHandle open(Cluster cluster, long ledgerId, Options options) throws Exception {
        switch (options.text("handles", "following")) {
            case "plain":
                return cluster.howToOpen(ledgerId).execute().get();
            case "notified":
                return notifications(options.text("notifyServer", ""))
                        .open(cluster.client(), cluster.howToOpen(ledgerId))
                        .get();
            default:
                return cluster.openAndFollow(ledgerId);
        }
    }

    /** One connection for all ledgers, until the program ends. */
    private static synchronized LedgerNotifications notifications(String server) {
        if (notifications == null) {
            var http = HttpClient.newHttpClient();
            notifications = new LedgerNotifications(List.of(server), http::newWebSocketBuilder, "test");
        }
        return notifications;
    }

    private static void readAgain(long ledgerId, ReadHandle handle, Output output) {
        try {
            print(handle, Content.read(handle, handle.getLastAddConfirmed()), output);
        } catch (Exception error) {
            output.line("kind", "content", "ledger", ledgerId, "error", Errors.name(error));
        }
    }

    private static void print(ReadHandle handle, Content content, Output output) {
        output.line(
                "kind", "content",
                "ledger", handle.getId(),
                "state", handle.getLedgerMetadata().getState().toString(),
                "last", content.lastEntryId(),
                "length", handle.getLength(),
                "bytes", content.bytes(),
                "sha256", content.sha256());
    }

    /** Whether a ledger reads back as {@code {ledger, last, sha256}} says. Prints what was found. */
    static Verdict compare(Cluster cluster, Options expected, Output output) throws InterruptedException {
        long ledgerId = expected.number("ledger", -1);
        Verdict verdict;
        String found;
        try {
            LedgerHandle handle = cluster.openWithoutRecovery(ledgerId).get();
            found = difference(handle, expected);
            verdict = found == null ? Verdict.WHOLE : Verdict.MISSING;
            handle.close();
        } catch (InterruptedException error) {
            throw error;
        } catch (Exception error) {
            found = Errors.name(error);
            verdict = isNo(error) ? Verdict.MISSING : Verdict.UNKNOWN;
        }
        output.line(
                "kind", "comparison",
                "ledger", ledgerId,
                "verdict", verdict.toString(),
                "error", found);
        return verdict;
    }

    /** Null when there is none. An open ledger's last add confirmed may lag behind what was written. */
    private static String difference(LedgerHandle handle, Options expected) throws Exception {
        long expectedLast = expected.number("last", -1);
        long last = handle.getLastAddConfirmed();
        boolean isClosed = handle.getLedgerMetadata().isClosed();
        if (isClosed ? last != expectedLast : last > expectedLast) {
            return "last entry is " + last + ", expected " + expectedLast;
        }
        String sha256 = Content.read(handle, expectedLast).sha256();
        return sha256.equals(expected.text("sha256", "")) ? null : "payloads have sha256 " + sha256;
    }

    private static boolean isNo(Throwable error) {
        return Errors.cause(error) instanceof BKException failure
                && switch (failure.getCode()) {
                    case BKException.Code.NoSuchLedgerExistsOnMetadataServerException,
                            BKException.Code.NoSuchLedgerExistsException,
                            BKException.Code.NoSuchEntryException,
                            BKException.Code.DigestMatchException ->
                            true;
                    default -> false;
                };
    }
}
