package bookmender;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.http.HttpClient;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/**
 * Registers ledgers at notify servers, without a BookKeeper client. Arguments: URLs of servers.
 *
 * <p>Lines on stdin: {@code register ID KNOWN}, {@code unregister ID}, {@code digest}, {@code stale}. What
 * listeners are told comes on stdout, and answers. Ends with stdin.
 */
public final class NotificationsDriver {
    private NotificationsDriver() {}

    public static void main(String[] servers) throws Exception {
        Output output = new Output(System.out);
        Map<Long, LedgerNotifications.Listener> listeners = new HashMap<>();
        var http = HttpClient.newHttpClient();
        try (var notifications = new LedgerNotifications(List.of(servers), http::newWebSocketBuilder, "driver")) {
            var stdin = new BufferedReader(new InputStreamReader(System.in));
            for (String line = stdin.readLine(); line != null; line = stdin.readLine()) {
                String[] words = line.split(" ");
                if (words[0].equals("register")) {
                    long ledgerId = Long.parseLong(words[1]);
                    listeners.put(ledgerId, new Teller(ledgerId, Long.parseLong(words[2]), output));
                    notifications.register(listeners.get(ledgerId));
                } else if (words[0].equals("unregister")) {
                    notifications.unregister(listeners.remove(Long.parseLong(words[1])));
                } else if (words[0].equals("stale")) {
                    output.line("kind", "stale", "stale", notifications.staleFor().isPresent());
                } else {
                    output.line("kind", "digest", "digest", notifications.digest());
                }
            }
        }
    }

    private static final class Teller extends LedgerNotifications.Listener {
        private final long ledgerId;
        private final Output output;

        Teller(long ledgerId, long known, Output output) {
            super(ledgerId, known);
            this.ledgerId = ledgerId;
            this.output = output;
        }

        @Override
        protected void changed(long version, boolean isDeleted) {
            output.line("kind", "changed", "ledger", ledgerId, "version", version, "deleted", isDeleted);
        }

        @Override
        protected void refused(String code) {
            output.line("kind", "refused", "ledger", ledgerId, "code", code);
        }
    }
}
